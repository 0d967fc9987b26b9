//! Both forms of the link, by the same checks.

use std::{
    net::{TcpListener, TcpStream},
    sync::mpsc,
    time::Duration,
};

use proptest::{collection::vec, prelude::*};

use super::*;

const LONG: Duration = Duration::from_secs(20);
/// Patient, so that a machine busy with other work stalls nobody; and with beats between all messages.
const CONFIG: ControlConfig = ControlConfig {
    max_message_bytes: 70_000,
    queue_len: 4,
    send_timeout: LONG,
    heartbeat: Heartbeat { interval: Duration::from_millis(1), silence: LONG },
};
/// For the test of what becomes of a receiver that stands still.
const IMPATIENT: ControlConfig = ControlConfig { send_timeout: Duration::from_millis(100), ..CONFIG };

fn local(n_ranks: usize, config: ControlConfig) -> (Leader, Vec<ControlLink>) {
    local_control(n_ranks, config)
}

fn tcp(n_ranks: usize, config: ControlConfig) -> (Leader, Vec<ControlLink>) {
    let (leader, followers) = (1..n_ranks)
        .map(|rank| {
            let (here, there) = raw_pair();
            (tcp_link(rank, here, config).unwrap(), tcp_link(0, there, config).unwrap())
        })
        .unzip();
    (Leader::new(leader), followers)
}

fn raw_pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let there = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (listener.accept().unwrap().0, there)
}

type MakeLinks = fn(usize, ControlConfig) -> (Leader, Vec<ControlLink>);
const FORMS: [(&str, MakeLinks); 2] = [("local", local), ("tcp", tcp)];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Messages of any length arrive whole, once, and in order, in both directions; by `recv_timeout` and by sink.
    #[test]
    fn messages_arrive_whole_and_in_order(messages in vec(vec(any::<u8>(), 0..3000), 0..20), n_ranks in 2_usize..5) {
        for (name, make) in FORMS {
            let (leader, followers) = make(n_ranks, CONFIG);
            let (events, at_leader) = mpsc::channel();
            let (to_followers, readers) = leader.spawn_readers(move |rank, event| {
                let _ = events.send((rank, event));
            }).unwrap();
            let got = thread::scope(|scope| {
                let threads: Vec<_> = followers.into_iter().map(|mut link| scope.spawn(|| {
                    let got: Vec<_> = messages.iter().map(|_| link.recv_timeout(LONG).unwrap()).collect();
                    messages.iter().rev().for_each(|message| link.send(message).unwrap());
                    (link, got)
                })).collect();
                messages.iter().for_each(|message| to_followers.broadcast(message).unwrap());
                threads.into_iter().map(|thread| thread.join().unwrap().1).collect::<Vec<_>>()
            });
            prop_assert!(got.iter().all(|got| *got == messages), "{}", name);
            // The followers' ends are gone: all events, then one error each, then the end of the sink.
            let events: Vec<_> = at_leader.iter().collect();
            for rank in 1..n_ranks {
                let of_rank: Vec<_> = events.iter().filter(|event| event.0 == rank).map(|event| &event.1).collect();
                let want: Vec<_> = messages.iter().rev().cloned().map(Ok).chain([Err(ControlError::Closed { peer: rank })]).collect();
                prop_assert_eq!(of_rank, want.iter().collect::<Vec<_>>(), "{} rank {}", name, rank);
            }
            readers.into_iter().for_each(Reader::stop);
        }
    }
}

#[test]
fn a_receive_that_timed_out_loses_nothing() {
    let (mut raw, there) = raw_pair();
    let mut link = tcp_link(1, there, CONFIG).unwrap();
    let brief = Duration::from_millis(2);
    for byte in [3, 0, 0, 0, 7, 8] {
        std::io::Write::write_all(&mut raw, &[byte]).unwrap();
        assert_eq!(link.recv_timeout(brief), Err(ControlError::Timeout { waited: brief }));
    }
    std::io::Write::write_all(&mut raw, &[9]).unwrap();
    assert_eq!(link.recv_timeout(LONG), Ok(vec![7, 8, 9]));
}

#[test]
fn too_long_messages_are_refused_on_both_sides() {
    for (name, make) in FORMS {
        let (leader, mut followers) = make(2, CONFIG);
        let too_long = ControlError::TooLong { n_bytes: 70_001, max_message_bytes: 70_000 };
        assert_eq!(leader.broadcast(&[0; 70_001]), Err(too_long), "{name}");
        leader.broadcast(&[1; 70_000]).unwrap();
        assert_eq!(followers[0].recv_timeout(LONG), Ok(vec![1; 70_000]), "{name}");
    }
    let (mut raw, there) = raw_pair();
    let mut link = tcp_link(1, there, CONFIG).unwrap();
    // The longest length that is no beat.
    std::io::Write::write_all(&mut raw, &(u32::MAX - 1).to_le_bytes()).unwrap();
    let announced = ControlError::TooLong { n_bytes: (u32::MAX - 1) as usize, max_message_bytes: 70_000 };
    assert_eq!(link.recv_timeout(LONG), Err(announced));
}

#[test]
fn a_follower_that_does_not_receive_stalls_the_sender_for_the_bound_only() {
    for (name, make) in FORMS {
        let (leader, _followers) = make(2, IMPATIENT);
        let stalled = (0..10_000).find_map(|_| leader.broadcast(&[0; 70_000]).err());
        assert_eq!(
            stalled,
            Some(ControlError::Stalled { peer: 1, waited: IMPATIENT.send_timeout }),
            "{name}"
        );
    }
}

#[test]
fn sending_to_a_closed_peer_fails() {
    for (name, make) in FORMS {
        let (leader, followers) = make(2, CONFIG);
        drop(followers);
        // The operating system may take a first message before it learns of the close.
        let err = (0..10_000).find_map(|_| leader.broadcast(&[0]).err());
        assert_eq!(err, Some(ControlError::Closed { peer: 1 }), "{name}");
        assert_eq!(
            leader.broadcaster().send(2, &[0]),
            Err(ControlError::NoSuchRank { rank: 2, n_followers: 1 })
        );
    }
}

#[test]
fn stopping_a_reader_ends_its_thread_without_an_error_to_the_sink() {
    for (name, make) in FORMS {
        let (leader, mut followers) = make(2, CONFIG);
        let (send, recv) = mpsc::channel();
        let (_, reader) =
            followers.remove(0).spawn_reader(move |message| send.send(message).unwrap()).unwrap();
        leader.broadcast(&[5]).unwrap();
        assert_eq!(recv.recv(), Ok(Ok(vec![5])), "{name}");
        reader.stop();
        let rest: Vec<_> = recv.iter().collect();
        assert!(rest.is_empty(), "{name}: {rest:?}");
    }
}

/// A peer that stands still says nothing more, and its connection stays open.
#[test]
fn a_silent_peer_ends_the_link_and_a_beating_one_does_not() {
    let (here, mut there) = raw_pair();
    let silence = Duration::from_millis(50);
    let config = ControlConfig { heartbeat: Heartbeat { silence, ..CONFIG.heartbeat }, ..CONFIG };
    let (events, at_sink) = mpsc::channel();
    let link = tcp_link(3, here, config).unwrap();
    let (_sender, _reader) = link.spawn_reader(move |event| events.send(event).unwrap()).unwrap();
    let end = at_sink.recv_timeout(LONG).unwrap();
    assert_eq!(end, Err(ControlError::Silent { peer: 3, waited: silence }));
    // This end beat for as long as it listened, and is closed.
    let mut beats = Vec::new();
    io::Read::read_to_end(&mut there, &mut beats).unwrap();
    assert!(!beats.is_empty() && beats.iter().all(|&byte| byte == 0xff), "{beats:?}");
}

/// Beats alone keep a link: the reader of each end hears the other's, however long nobody says anything.
#[test]
fn beats_are_heard_and_are_no_messages() {
    let (leader, mut followers) = tcp(2, CONFIG);
    let (_broadcaster, readers) = leader.spawn_readers(|_, event| panic!("{event:?}")).unwrap();
    let mut link = followers.pop().unwrap();
    // Some beats have come before this returns, and it reads past them.
    assert!(matches!(link.recv_timeout(Duration::from_millis(50)), Err(ControlError::Timeout { .. })));
    readers.into_iter().for_each(Reader::stop);
}
