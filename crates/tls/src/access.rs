//! Which roles may call which services, decided before a request reaches its service.
//!
//! One table for a process and not a check in each service: a service that is forgotten in the table can be called by
//! nobody, where a check that is forgotten would let everybody in.

use std::{
    convert::Infallible,
    future::{Ready, ready},
    sync::Arc,
    task::{Context, Poll},
};

use futures::future::Either;
use tonic::{
    Status,
    body::Body,
    codegen::http::{Request, Response},
};
use tower::{Layer, Service};

use crate::{dial::Security, listen::Peer, role::Role};

/// Every member of the cluster, for services that tell nothing and do nothing.
pub const ANY_ROLE: &[Role] = &Role::ALL;

/// The services of a process, each with the roles that may call it.
#[derive(Clone, Copy, Debug)]
pub struct Access(pub &'static [(&'static str, &'static [Role])]);

/// Puts the table before all services of a server.
#[derive(Clone, Debug)]
pub struct GuardLayer {
    rules: Option<Arc<Rules>>,
}

/// Services behind the table.
#[derive(Clone, Debug)]
pub struct Guard<S> {
    inner: S,
    rules: Option<Arc<Rules>>,
}

#[derive(Debug)]
struct Rules {
    access: Access,
    cluster: String,
}

impl Access {
    /// The table at work. Without TLS nobody has shown who he is, and all are let through.
    pub fn layer(self, security: &Security) -> GuardLayer {
        let rules = match security {
            Security::Plaintext => None,
            Security::Mutual(identity) => {
                Some(Arc::new(Rules { access: self, cluster: identity.cluster().to_owned() }))
            }
        };
        GuardLayer { rules }
    }
}

impl Rules {
    fn check<B>(&self, request: &Request<B>) -> Result<(), Status> {
        let service = request.uri().path().split('/').nth(1).unwrap_or_default();
        let roles =
            self.access.0.iter().find(|(name, _)| *name == service).map_or(&[][..], |(_, roles)| roles);
        let wanted: Vec<_> = roles.iter().map(|role| role.dns_name(&self.cluster)).collect();
        // A request whose connection left no trace of its peer has shown nothing.
        let names =
            request.extensions().get::<Peer>().and_then(|peer| peer.names.as_deref()).unwrap_or_default();
        if names.iter().any(|name| wanted.contains(name)) {
            return Ok(());
        }
        let (wanted, names) = (wanted.join(" or "), names.join(", "));
        tracing::warn!(service, wanted, names, "a call was refused");
        Err(Status::permission_denied(if wanted.is_empty() {
            format!("no role may call {service:?} here; the caller is {names}")
        } else {
            format!("{service} is for {wanted}; the caller is {names}")
        }))
    }
}

impl<S> Layer<S> for GuardLayer {
    type Service = Guard<S>;

    fn layer(&self, inner: S) -> Guard<S> {
        Guard { inner, rules: self.rules.clone() }
    }
}

impl<S, B> Service<Request<B>> for Guard<S>
where
    S: Service<Request<B>, Response = Response<Body>, Error = Infallible>,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Either<S::Future, Ready<Result<Response<Body>, Infallible>>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        match self.rules.as_ref().map_or(Ok(()), |rules| rules.check(&request)) {
            Ok(()) => Either::Left(self.inner.call(request)),
            Err(status) => Either::Right(ready(Ok(status.into_http()))),
        }
    }
}
