"""The official openai client against the HTTP face of a running router.

    python interop_openai.py --http 127.0.0.1:8080
"""

import argparse
import json
import threading
import urllib.error
import urllib.request
from concurrent import futures

import openai

from checks import Checks, equal, main, refused

PROMPT = "The capital of France is"
QUESTION = [{"role": "user", "content": "Why is the sky blue?"}]
TIMEOUT_S = 120

check = Checks()


class Client:
    """The official client, the name of the served model, and the requests that most checks make."""

    def __init__(self, address):
        self.base = f"http://{address}"
        self.api = openai.OpenAI(base_url=f"{self.base}/v1", api_key="unused", max_retries=0, timeout=TIMEOUT_S)
        self.model = self.api.models.list().data[0].id

    def complete(self, **fields):
        return self.api.completions.create(
            **({"model": self.model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0} | fields)
        )

    def chat(self, **fields):
        return self.api.chat.completions.create(
            **({"model": self.model, "messages": QUESTION, "max_tokens": 16, "temperature": 0} | fields)
        )

    def post(self, path, body):
        """Status and body of a plain request: what no client library hides or repairs."""
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self.base + path, data=body, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def get(self, path):
        with urllib.request.urlopen(self.base + path, timeout=TIMEOUT_S) as answer:
            return answer.status, answer.read()


@check
def the_model_is_listed(client):
    (model,) = client.api.models.list().data
    equal(model.object, "model", "object")
    assert model.id, "the model has a name"


@check
def operators_find_their_pages(client):
    for path in ("/healthz", "/readyz"):
        equal(client.get(path)[0], 200, path)
    status, metrics = client.get("/metrics")
    equal(status, 200, "/metrics")
    assert b"longreach_" in metrics, "metrics have our prefix"


@check
def chat_answers(client):
    answer = client.chat()
    equal(answer.object, "chat.completion", "object")
    (choice,) = answer.choices
    equal((choice.index, choice.message.role), (0, "assistant"), "index and role")
    assert choice.message.content.strip(), "an answer"
    assert choice.finish_reason in ("stop", "length"), choice.finish_reason
    usage = answer.usage
    equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens, "total tokens")
    assert 0 < usage.completion_tokens <= 16 and usage.prompt_tokens > 0, f"usage: {usage}"
    equal(client.chat(max_tokens=openai.omit, max_completion_tokens=16).choices, answer.choices, "newer name of max_tokens")


@check
def chat_stream_is_the_answer_in_pieces(client):
    wanted = client.chat()
    chunks = list(client.chat(stream=True))
    equal({chunk.object for chunk in chunks}, {"chat.completion.chunk"}, "object")
    equal(len({chunk.id for chunk in chunks}), 1, "ids in one stream")
    equal(chunks[0].choices[0].delta.role, "assistant", "role in the first chunk")
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    equal(text, wanted.choices[0].message.content, "text")
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    equal(reasons[-1], wanted.choices[0].finish_reason, "finish reason")
    equal(reasons[:-1], [None] * (len(reasons) - 1), "finish reason in the last chunk only")
    assert all(chunk.usage is None for chunk in chunks), "usage was not asked for"


@check
def usage_comes_last_when_asked_for(client):
    wanted = client.chat().usage
    chunks = list(client.chat(stream=True, stream_options={"include_usage": True}))
    equal(chunks[-1].choices, [], "choices beside the usage")
    usage = chunks[-1].usage
    equal(usage.prompt_tokens, wanted.prompt_tokens, "prompt tokens")
    equal(usage.completion_tokens, wanted.completion_tokens, "completion tokens")
    assert all(chunk.usage is None for chunk in chunks[:-1]), "usage in the last chunk only"


@check
def completions_answer_and_stream_the_same(client):
    answer = client.complete()
    equal(answer.object, "text_completion", "object")
    text = answer.choices[0].text
    assert "Paris" in text, f"a sensible answer: {text!r}"
    chunks = list(client.complete(stream=True, stream_options={"include_usage": True}))
    equal("".join(chunk.choices[0].text for chunk in chunks[:-1]), text, "text")
    equal(chunks[-1].usage.completion_tokens, answer.usage.completion_tokens, "completion tokens")


@check
def a_prompt_of_token_ids_is_taken(client):
    answer = client.complete(prompt=[1, 2, 3], max_tokens=2)
    equal(answer.usage.prompt_tokens, 3, "prompt tokens")


@check
def the_wire_is_what_clients_parse(client):
    body = {"model": client.model, "prompt": PROMPT, "max_tokens": 4, "stream": True}
    status, answer = client.post("/v1/completions", json.dumps(body).encode())
    equal(status, 200, "status")
    events = [event for event in answer.decode().split("\n\n") if event]
    data = [event for event in events if not event.startswith(":")]
    equal(data[-1], "data: [DONE]", "last event")
    for event in data[:-1]:
        assert event.startswith("data: ") and "\n" not in event, f"event: {event!r}"
        json.loads(event.removeprefix("data: "))


@check
def line_breaks_in_text_do_not_break_events(client):
    hostile = "say a\r\nb\rc\n\n: x\ndata: y \u0000 and \u2028"
    text = client.complete(prompt=hostile, max_tokens=6).choices[0].text
    chunks = list(client.complete(prompt=hostile, max_tokens=6, stream=True))
    equal("".join(chunk.choices[0].text for chunk in chunks), text, "text")


@check
def logprobs_of_chat_spell_the_answer(client):
    choice = client.chat(logprobs=True, top_logprobs=2).choices[0]
    entries = choice.logprobs.content
    spelled = b"".join(bytes(entry.bytes) for entry in entries)
    assert spelled.decode(errors="replace").startswith(choice.message.content), f"spelled: {spelled!r}"
    for entry in entries:
        equal(len(entry.top_logprobs), 2, "alternatives")
        equal(entry.top_logprobs[0].logprob, entry.logprob, "greedy takes the most likely token")
        assert entry.logprob <= 0.0, f"log-probability {entry.logprob}"


@check
def logprobs_of_completions_have_the_old_form(client):
    choice = client.complete(logprobs=2).choices[0]
    logprobs = choice.logprobs
    equal(len(logprobs.tokens), 12, "tokens")
    equal(len(logprobs.token_logprobs), 12, "log-probabilities")
    equal("".join(logprobs.tokens), choice.text, "spelling of the tokens")
    assert all(1 <= len(top) <= 3 for top in logprobs.top_logprobs), "alternatives"


@check
def several_choices_have_their_own_ends(client):
    answer = client.chat(n=3, temperature=1.0, seed=11)
    equal([choice.index for choice in answer.choices], [0, 1, 2], "indices")
    texts, reasons = {}, {}
    for chunk in client.chat(n=3, temperature=1.0, seed=11, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason:
                assert choice.index not in reasons, f"choice {choice.index} finished twice"
                reasons[choice.index] = choice.finish_reason
    equal(texts, {choice.index: choice.message.content for choice in answer.choices}, "texts")
    equal(reasons, {choice.index: choice.finish_reason for choice in answer.choices}, "finish reasons")


@check
def a_seed_decides(client):
    first, again = (client.complete(temperature=1.0, seed=3).choices[0].text for _ in range(2))
    equal(again, first, "text of the same seed")
    assert client.complete(temperature=5.0, seed=4).choices[0].text != first, "another seed gives another text"


@check
def stop_strings_end_the_text(client):
    text = client.complete().choices[0].text
    stop = text[6:10]
    for stops in (stop, [stop, "never to be seen"]):
        choice = client.complete(stop=stops).choices[0]
        equal(choice.text, text[: text.index(stop)], "text before the stop string")
        equal(choice.finish_reason, "stop", "finish reason")
    pieces = [chunk.choices[0].text for chunk in client.complete(stop=stop, stream=True)]
    equal("".join(pieces), text[: text.index(stop)], "text of the stream")


@check
def refusals_have_the_type_that_clients_expect(client):
    error = refused(openai.NotFoundError, client.chat, model="no-such-model")
    equal(error.body["type"], "invalid_request_error", "type")
    equal(error.body["param"], "model", "param")
    equal(error.body["code"], "model_not_found", "code")
    cases = [
        ("temperature", {"temperature": -1}),
        ("top_p", {"top_p": 2}),
        ("max_tokens", {"max_tokens": 0}),
        ("n", {"n": 0}),
        ("stop", {"stop": [""]}),
        ("messages", {"messages": []}),
        ("logit_bias", {"logit_bias": {"99999999": 1}}),
    ]
    for field, fields in cases:
        error = refused(openai.BadRequestError, client.chat, **fields)
        equal(error.body["type"], "invalid_request_error", f"type for {fields}")
        assert field in (error.body["param"] or ""), f"{fields}: param is {error.body['param']!r}"
        assert error.body["message"], "a message"
    too_long = refused(openai.BadRequestError, client.complete, prompt=[1] * 100_000)
    equal(too_long.body["code"], "context_length_exceeded", "code of a prompt that is too long")


@check
def a_refused_stream_is_a_refusal_and_no_stream(client):
    error = refused(openai.BadRequestError, client.chat, stream=True, temperature=-1)
    equal(error.status_code, 400, "status")


@check
def bodies_that_are_not_requests_are_refused(client):
    for body in (b"", b"{", b"[]", b"null", b'{"model": 5}', b'{"prompt": "\\ud83d"}', b"\xff\xfe", b"[" * 10_000):
        status, answer = client.post("/v1/completions", body)
        equal(status, 400, f"status for {body[:20]!r}")
        error = json.loads(answer)["error"]
        assert error["message"] and error["type"] == "invalid_request_error", f"error: {error}"
    equal(client.post("/v1/no-such-path", b"{}")[0], 404, "status of an unknown path")


@check
def a_client_that_leaves_harms_nobody(client):
    wanted = client.complete().choices
    for n_read in (0, 1, 3):
        stream = client.complete(max_tokens=500, stream=True, extra_body={"ignore_eos": True})
        for _ in range(n_read):
            next(stream)
        stream.close()
    equal(client.complete().choices, wanted, "choices after they left")


@check
def clients_at_once_get_what_they_would_get_alone(client):
    prompts = [f"{PROMPT} {word}" for word in ("Paris and", "not", "a city where")]
    alone = [client.complete(prompt=prompt, max_tokens=24).choices for prompt in prompts]
    barrier = threading.Barrier(len(prompts))

    def together(prompt):
        with openai.OpenAI(base_url=f"{client.base}/v1", api_key="unused", max_retries=0, timeout=TIMEOUT_S) as own:
            barrier.wait()
            stream = own.completions.create(model=client.model, prompt=prompt, max_tokens=24, temperature=0, stream=True)
            return "".join(chunk.choices[0].text for chunk in stream)

    with futures.ThreadPoolExecutor(len(prompts)) as pool:
        equal(list(pool.map(together, prompts)), [choices[0].text for choices in alone], "texts")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--http", required=True, help="address of the router's HTTP face")
    return parser.parse_args()


if __name__ == "__main__":
    main(check, Client(parse_arguments().http))
