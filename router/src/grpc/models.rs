//! `ModelService`: what is served, within which limits, by which groups.

use std::sync::Arc;

use longreach_proto::inference::{
    Capabilities, DecodeGroup, GetModelRequest, GetModelResponse, Limits, ListModelsRequest,
    ListModelsResponse, Model, model_service_server::ModelService,
};
use longreach_text::MAX_STOPS;
use longreach_types::MAX_LOGPROBS;
use tonic::{Request, Response, Status};

use super::convert::count;
use crate::gateway::Gateway;

/// Serves `ModelService`.
pub(crate) struct ModelFace(Arc<Gateway>);

impl ModelFace {
    pub(super) fn new(gateway: Arc<Gateway>) -> Self {
        Self(gateway)
    }

    fn model(&self) -> Model {
        let limits = self.0.model_limits().ok();
        let groups = self.0.groups();
        let group = |group: &longreach_proto::worker::GroupInfo| DecodeGroup {
            name: group.group_id.clone(),
            n_ranks: count(group.n_ranks),
            dcp_size: count(group.dcp_size),
            max_seq_len: count(group.max_seq_len),
        };
        Model {
            name: self.0.model_name.clone(),
            limits: Some(Limits {
                max_context_len: limits.map_or(0, |limits| count(limits.max_context_len)),
                vocab_size: limits.map_or(0, |limits| count(limits.vocab_size)),
                max_choices: count(self.0.limits.max_choices),
                max_stop_strings: count(MAX_STOPS),
                max_top_logprobs: count(MAX_LOGPROBS),
            }),
            capabilities: Some(Capabilities { chat: self.0.text.template().is_some() }),
            groups: groups.iter().map(|info| group(info)).collect(),
        }
    }
}

#[tonic::async_trait]
impl ModelService for ModelFace {
    async fn list_models(
        &self,
        _request: Request<ListModelsRequest>,
    ) -> Result<Response<ListModelsResponse>, Status> {
        Ok(Response::new(ListModelsResponse { models: vec![self.model()] }))
    }

    async fn get_model(
        &self,
        request: Request<GetModelRequest>,
    ) -> Result<Response<GetModelResponse>, Status> {
        self.0.check_model(Some(&request.into_inner().name))?;
        Ok(Response::new(GetModelResponse { model: Some(self.model()) }))
    }
}
