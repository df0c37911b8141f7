//! What befalls a node: cables that are pulled, a second agent.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use dranic::netdev::link;
use dranic::netlink::RouteSocket;

use super::{Agent, Site};

impl Site {
    /// Pulls the cable of a NIC, wherever the NIC is, or plugs it in again.
    ///
    /// # Errors
    /// When there is no such NIC, or it is gone.
    pub fn plug(&self, nic: &str, plugged: bool) -> Result<()> {
        let number = self.options.nics.iter().position(|spec| spec.name == nic);
        // The fabric numbers its ports in the order they are made.
        let port = format!("port{}", number.with_context(|| format!("no NIC {nic}"))?);
        let mut fabric = RouteSocket::open_in(self.fabric.netns())?;
        let deadline = Instant::now() + Duration::from_secs(10);
        let link = link::by_name(&mut fabric, &port, deadline)?.with_context(|| format!("the cable of {nic} is gone"))?;
        Ok(link::set_up(&mut fabric, link.index, plugged, deadline)?)
    }

    /// Starts one more agent, as the pod with this UID; the present one goes on.
    ///
    /// # Errors
    /// When the program can't be run.
    pub fn start_instance(&mut self, uid: &str) -> Result<Agent> {
        let arguments = self.options.arguments.len();
        self.options.arguments.extend(["--instance".to_owned(), uid.to_owned()]);
        let agent = Agent::spawn(&self.options, &self.node, &self.dir, &self.nri_socket);
        self.options.arguments.truncate(arguments);
        agent
    }
}
