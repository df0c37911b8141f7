//! Runs scenarios one after the other, and looks after each whether everything was given back.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Result, bail, ensure};
use k8s_openapi::api::resource::v1::DeviceClass;
use kube::api::{Api, Patch, PatchParams};
use serde_json::json;

use crate::Args;
use crate::cluster::Cluster;
use crate::context::{Context, wait};
use crate::scenarios::{self, Run, Scenario};
use crate::table::{Outcome, Table};
use crate::{dump, inspect, objects, tap};

/// NICs of each node.
pub(crate) const RAILS: u32 = 8;

/// Why a scenario can't run on this cluster.
#[derive(Debug)]
pub(crate) struct Skipped(pub(crate) &'static str);

impl std::fmt::Display for Skipped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for Skipped {}

/// Runs what `args` choose. Prints one line for each scenario and the sum at the end.
///
/// # Errors
/// When there is no cluster to run anything on.
pub(crate) async fn run(args: &Args) -> Result<bool> {
    let cluster = Cluster::connect(&args.cluster, &args.scripts).await?;
    let seed = args.seed.unwrap_or_else(|| SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |d| d.as_secs()));
    println!("seed {seed}, containerd {}", cluster.containerd()?);
    let class: DeviceClass = serde_json::from_value(objects::class())?;
    let classes: Api<DeviceClass> = Api::all(cluster.client.clone());
    classes.patch(objects::CLASS, &PatchParams::apply("dranic-e2e").force(), &Patch::Apply(&class)).await?;
    cluster.nodes.iter().for_each(|node| tap::mend(&cluster, node));
    idle(&cluster, Duration::from_secs(60)).await?;
    only_rails(&cluster).await?;

    let mut table = Table::default();
    for scenario in scenarios::ALL.iter().filter(|scenario| chosen(scenario, args)) {
        let namespace = format!("e2e-{}", scenario.name);
        let (told, figures) = (Arc::default(), Arc::default());
        let context = Context { cluster: cluster.clone(), namespace, full: args.full, seed, told, figures };
        let begin = Instant::now();
        let (body, outcome) = match scenario.run {
            Run::Now(body) => (Some(body), Outcome::Passed),
            Run::Later(_, Some(body)) if args.pending => (Some(body), Outcome::NoLongerPending),
            Run::Later(issue, _) => (None, Outcome::Pending(issue)),
        };
        let result = match body {
            Some(body) => one(scenario, body, &context).await,
            None => Ok(()),
        };
        let outcome = match result {
            Ok(()) => outcome,
            Err(error) if error.is::<Skipped>() => Outcome::Skipped(error.to_string()),
            Err(error) => Outcome::Failed(format!("{error:#}")),
        };
        let failed = matches!(outcome, Outcome::Failed(_));
        let figures = context.figures.lock().unwrap_or_else(PoisonError::into_inner).clone();
        println!("{}", table.add(scenario.name, outcome, begin.elapsed(), figures));
        tell(&context);
        if failed {
            look_into(args, scenario, &context, begin.elapsed()).await?;
        }
    }
    if let Some(file) = &args.json {
        table.write(file, seed)?;
    }
    table.print();
    Ok(table.failed() == 0)
}

fn chosen(scenario: &Scenario, args: &Args) -> bool {
    let named = |names: &[String]| names.iter().any(|name| scenario.name.contains(name.as_str()));
    (args.only.is_empty() || named(&args.only)) && !named(&args.skip) && (!args.smoke || scenario.smoke)
}

/// After a failure: writes down the state of everything, then cleans up.
async fn look_into(args: &Args, scenario: &Scenario, context: &Context, since: Duration) -> Result<()> {
    let folder = args.dump.join(scenario.name);
    let excerpt = dump::everything(&context.cluster, &folder, &context.namespace, since).await;
    println!("        everything is in {}", folder.display());
    excerpt.lines().for_each(|line| println!("        {line}"));
    if args.keep {
        bail!("{} left as it is", context.namespace);
    }
    close(context).await;
    Ok(())
}

fn tell(context: &Context) {
    let told = context.told.lock().unwrap_or_else(PoisonError::into_inner);
    told.iter().for_each(|line| println!("        {line}"));
}

/// The scenario with its time limit; its namespace goes, and everything that was lent must be back.
async fn one(scenario: &Scenario, body: scenarios::Body, context: &Context) -> Result<()> {
    let whole = async {
        context.open(json!({"resource.kubernetes.io/admin-access": "true"})).await?;
        let done = body(context.clone()).await;
        // What is skipped may have made something before, too.
        if done.as_ref().is_err_and(|error| !error.is::<Skipped>()) {
            return done;
        }
        context.leave().await?;
        idle(&context.cluster, Duration::from_secs(20)).await?;
        for node in &context.cluster.nodes {
            context.cluster.nics(node, RAILS).await?; // links that the scenario made beside them go
        }
        only_rails(&context.cluster).await?;
        done
    };
    match tokio::time::timeout(scenario.limit, whole).await {
        Ok(result) => result,
        Err(_) => bail!("took longer than its {} s", scenario.limit.as_secs()),
    }
}

/// After a failure: what is left must not make the next scenario fail.
async fn close(context: &Context) {
    if let Err(error) = context.leave().await {
        println!("        cleaning up: {error:#}");
    }
    for node in &context.cluster.nodes {
        if let Err(error) = context.cluster.nics(node, RAILS).await {
            println!("        cleaning up: {error:#}");
        }
    }
    if let Err(error) = idle(&context.cluster, Duration::from_secs(30)).await {
        println!("        cleaning up: {error:#}");
    }
}

/// The slices have the NICs of the rails and nothing else: no device of the last scenario can be allocated in the next.
async fn only_rails(cluster: &Cluster) -> Result<()> {
    for node in &cluster.nodes {
        wait(Duration::from_secs(20), &format!("{node} publishes its {RAILS} NICs"), || async {
            let published = cluster.status(node).await?.published_devices;
            ensure!(published == RAILS as usize, "{published} devices are published");
            Ok(())
        })
        .await?;
    }
    Ok(())
}

/// Nothing is lent, and every NIC is on its node as it was: name, address, MTU, state.
pub(crate) async fn idle(cluster: &Cluster, limit: Duration) -> Result<()> {
    for node in &cluster.nodes {
        wait(limit, &format!("{node} has everything back"), || async {
            let status = cluster.status(node).await?;
            let claims: Vec<_> = status.claims.iter().map(|c| format!("{}/{}", c.namespace, c.name)).collect();
            ensure!(claims.is_empty(), "the agent still holds {claims:?}");
            let links = inspect::links(cluster.init_pid(node)?).await?;
            for rail in 0..RAILS {
                let name = format!("nic{rail}");
                let Some(link) = links.iter().find(|link| link.ifname == name) else { bail!("{name} is missing") };
                let number = node.trim_start_matches("node");
                ensure!(
                    link.is_up() && link.mtu == 9000 && link.addresses() == [format!("10.20.{rail}.{number}/24")],
                    "{name} is not as it was: {link:?}"
                );
            }
            Ok(())
        })
        .await?;
    }
    Ok(())
}
