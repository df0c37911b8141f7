//! What reaches our hooks, and what becomes of their answers.

use anyhow::{Context as _, Result, ensure};
use dranic::nri::proto;
use dranic_testbed::runtime::scripted::{Behaviour, Script, ScriptedPlugin};
use dranic_testbed::runtime::{Caller, Kind, SandboxSpec};
use prost::Message as _;

use super::{Case, Cost};
use crate::lab::{Lab, container, ms, named, ours};
use crate::room::{HOOK, NAME, Seen};

const ALL: [Kind; 4] = [Kind::Run, Kind::Create, Kind::Stop, Kind::Remove];

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("hooks", "each request reaches its hook, by an RPC of its own or as an event", |lab| Box::pin(hooks(lab))),
        Case::new("host-network", "a pod without a network namespace", |lab| Box::pin(host_network(lab))),
        Case::new("pods-of-others", "no hook is called, and the answer is empty", |lab| Box::pin(others(lab))),
        Case::new("refusal", "the text of a refusal, alone; Stop and Remove never fail", |lab| Box::pin(refusal(lab))),
        Case::new("repeated", "every request twice, Stop without Run, Remove without Stop", |lab| Box::pin(repeated(lab))),
        Case::new("oci-hooks", "our OCI hook beside that of an earlier plugin, which we see", |lab| Box::pin(oci_hooks(lab))),
        Case::new("device-twice", "a device that a plugin names twice", |lab| Box::pin(device_twice(lab))),
        Case::new("device-of-two", "a device that two plugins want", |lab| Box::pin(device_of_two(lab))),
        Case::new("unimplemented", "status 12 turns a plugin's requests into events", |lab| Box::pin(unimplemented(lab)))
            .only(|side| side.version.dedicated),
        Case::new("load", "64 pods, one after the other", |lab| Box::pin(load(lab))).cost(Cost::Heavy),
    ]
}

async fn hooks(lab: &mut Lab) -> Result<String> {
    lab.connected().await?;
    let pod = ours("a");
    for kind in ALL {
        lab.fine(kind, &pod).await?;
    }
    let seen = lab.handler()?.seen();
    let begun: Vec<_> =
        seen.iter().filter_map(|seen| if let Seen::Begin(hook, pod) = seen { Some((*hook, pod)) } else { None }).collect();
    ensure!(begun.iter().map(|(hook, _)| *hook).eq(["run", "create", "stop", "remove"]), "{begun:?}");
    for (hook, told) in &begun {
        let same = (&told.id, &told.uid, &told.name, &told.namespace) == (&pod.id, &pod.uid, &pod.name, &pod.namespace);
        ensure!(same && told.netns == pod.netns_path && !told.lost, "{hook}: {told:?}");
    }
    let of = |seen: &Seen| if let Seen::Container(container) = seen { Some(container.clone()) } else { None };
    let made = seen.iter().find_map(of).context("no container")?;
    ensure!((&*made.id, &*made.sandbox, &*made.name) == ("c-main", "a", "main"), "{made:?}");
    let methods: Vec<_> = lab.tap()?.calls().into_iter().skip(3).map(|call| call.method).collect();
    let wanted = if lab.side.version.dedicated {
        ["RunPodSandbox", "CreateContainer", "StopPodSandbox", "RemovePodSandbox"]
    } else {
        ["StateChange", "CreateContainer", "StateChange", "StateChange"]
    };
    ensure!(methods == wanted, "{methods:?}");
    Ok(String::new())
}

async fn host_network(lab: &mut Lab) -> Result<String> {
    lab.connected().await?;
    let pod = SandboxSpec { netns_path: None, ..ours("a") };
    lab.fine(Kind::Run, &pod).await?;
    let seen = lab.handler()?.seen();
    let told =
        seen.iter().find_map(|seen| if let Seen::Begin("run", pod) = seen { Some(pod) } else { None }).context("no Run")?;
    ensure!(told.netns.is_none() && !told.lost, "{told:?}");
    Ok(String::new())
}

async fn others(lab: &mut Lab) -> Result<String> {
    lab.connected().await?;
    let pod = SandboxSpec { uid: "foreign".to_owned(), ..named("f", "fails-10") };
    for kind in ALL {
        lab.fine(kind, &pod).await?;
        let answer = lab.calls(kind)?.pop().and_then(|call| call.answer).context("no answer")?;
        ensure!((answer.code, answer.payload.len()) == (0, 0), "{answer:?}");
    }
    ensure!(lab.handler()?.begun().is_empty(), "{:?}", lab.handler()?.begun());
    Ok(String::new())
}

async fn refusal(lab: &mut Lab) -> Result<String> {
    lab.connected().await?;
    let pod = named("a", "fails-20");
    for kind in [Kind::Run, Kind::Create] {
        let error = lab.fails(kind, &pod).await?;
        ensure!(error == format!("rpc error: code = FailedPrecondition desc = {}", "x".repeat(20)), "{error}");
    }
    lab.fine(Kind::Stop, &pod).await?;
    lab.fine(Kind::Remove, &pod).await?;
    lab.has(&[NAME]).await?;
    Ok(String::new())
}

async fn repeated(lab: &mut Lab) -> Result<String> {
    lab.connected().await?;
    for kind in [Kind::Stop, Kind::Run, Kind::Run, Kind::Create, Kind::Remove, Kind::Remove, Kind::Stop, Kind::Stop, Kind::Remove]
    {
        lab.fine(kind, &ours("a")).await?;
    }
    ensure!(lab.handler()?.begun().len() == 9, "{:?}", lab.handler()?.begun());
    Ok(String::new())
}

async fn oci_hooks(lab: &mut Lab) -> Result<String> {
    lab.connected().await?;
    let hook = |path: &str| proto::Hook { path: path.to_owned(), args: vec!["other".to_owned()], ..proto::Hook::default() };
    let hooks = proto::Hooks { create_runtime: vec![hook("/opt/other")], ..proto::Hooks::default() };
    let adjust = proto::ContainerAdjustment { hooks: Some(hooks), ..proto::ContainerAdjustment::default() };
    let _earlier = lab.plugin(adjusting("05", "earlier", adjust)).await?;
    let done = lab.runtime()?.relay(Kind::Create, &ours("a"), Some(&container("hooked")), Caller::default()).await?;
    let ours = format!("{HOOK} guard");
    ensure!(done.error.is_none() && done.hooks == ["/opt/other other", &*ours], "{done:?}");
    let seen = lab.handler()?.seen();
    let told = seen.into_iter().find_map(|seen| if let Seen::Container(told) = seen { Some(told) } else { None });
    ensure!(told.as_ref().is_some_and(|told| told.create_runtime == ["/opt/other"]), "{told:?}");
    Ok(String::new())
}

fn adjusting(index: &str, name: &str, adjust: proto::ContainerAdjustment) -> Script {
    let payload = proto::CreateContainerResponse { adjust: Some(adjust) }.encode_to_vec();
    // Answers to pod events may not have it: they have no fields that could clash.
    Script { events: 0x0008, ..Script::new(index, name, None, Behaviour::Payload(payload)) }
}

fn devices(paths: &[&str]) -> proto::ContainerAdjustment {
    let device = |path: &&str| proto::LinuxDevice {
        path: (*path).to_owned(),
        r#type: "c".to_owned(),
        major: 231,
        minor: 192,
        ..proto::LinuxDevice::default()
    };
    let linux = proto::LinuxContainerAdjustment { devices: paths.iter().map(device).collect(), resources: None };
    proto::ContainerAdjustment { linux: Some(linux), ..proto::ContainerAdjustment::default() }
}

async fn device_twice(lab: &mut Lab) -> Result<String> {
    const PATH: &str = "/dev/infiniband/uverbs0";
    lab.start(|_| ()).await?;
    let once = lab.plugin(adjusting("50", "once", devices(&[PATH]))).await?;
    let done = lab.fine(Kind::Create, &ours("a")).await?;
    ensure!(done.devices == [PATH], "{done:?}");
    drop(once);
    let _twice = lab.plugin(adjusting("50", "twice", devices(&[PATH, PATH]))).await?;
    lab.has(&["50-twice"]).await?;
    let error = lab.fails(Kind::Create, &ours("a")).await?;
    let conflict = "plugins \"50-twice\" and \"50-twice\" both tried to set ";
    ensure!(error.starts_with(conflict) && error.ends_with(PATH), "{error}");
    lab.has(&["50-twice"]).await?;
    Ok(String::new())
}

async fn device_of_two(lab: &mut Lab) -> Result<String> {
    const PATH: &str = "/dev/infiniband/uverbs0";
    lab.start(|_| ()).await?;
    let _first = lab.plugin(adjusting("50", "first", devices(&[PATH]))).await?;
    let _second = lab.plugin(adjusting("60", "second", devices(&["/dev/a", PATH]))).await?;
    let error = lab.fails(Kind::Create, &ours("a")).await?;
    ensure!(error.starts_with("plugins \"60-second\" and \"50-first\" both tried to set ") && error.ends_with(PATH), "{error}");
    lab.has(&["50-first", "60-second"]).await?;
    Ok(String::new())
}

async fn unimplemented(lab: &mut Lab) -> Result<String> {
    lab.start(|_| ()).await?;
    let requests = [Kind::Run, Kind::Run, Kind::Stop, Kind::Create];
    let methods = |plugin: &ScriptedPlugin| plugin.asked().into_iter().map(|asked| asked.method).collect::<Vec<_>>();
    let old = lab.plugin(Script::new("50", "old", None, Behaviour::Old)).await?;
    for kind in requests {
        lab.fine(kind, &ours("a")).await?;
    }
    // Once refused with 12, pod events stay events; CreateContainer has no such way out.
    let asked = methods(&old);
    ensure!(asked == ["RunPodSandbox", "StateChange", "StateChange", "StateChange", "CreateContainer"], "{asked:?}");
    drop(old);
    let odd = lab.plugin(Script::new("50", "odd", None, Behaviour::Refuse(12, "what?".to_owned()))).await?;
    lab.has(&["50-odd"]).await?;
    for kind in requests {
        lab.fails(kind, &ours("a")).await?;
    }
    // An event that is refused with 12 is sent a second time.
    let asked = methods(&odd);
    ensure!(asked.len() == 7 && asked[1..6].iter().all(|method| method == "StateChange"), "{asked:?}");
    lab.has(&["50-odd"]).await?;
    Ok(String::new())
}

async fn load(lab: &mut Lab) -> Result<String> {
    const PODS: usize = 64;
    lab.connected().await?;
    let mut times = Vec::new();
    for number in 0..PODS {
        let pod = named(&format!("p{number}"), "slow-10");
        times.push(lab.fine(Kind::Run, &pod).await?.elapsed);
        for kind in [Kind::Create, Kind::Stop, Kind::Remove] {
            lab.fine(kind, &pod).await?;
        }
    }
    times.sort_unstable();
    let p99 = times[(PODS - 1) * 99 / 100];
    ensure!(p99 < ms(1000), "p99 of Run {p99:?}");
    lab.has(&[NAME]).await?;
    Ok(format!("p99 of Run {} ms, of which 10 are the hook's", p99.as_millis()))
}
