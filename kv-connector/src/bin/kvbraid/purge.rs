//! `kvbraid purge`: removes what belongs to one model or one tenant, from a running engine or from its directories.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use clap::Args;
use kv_connector::{
    Config,
    inspect::{Offline, OfflinePurge, PurgeRequest, Selector, TierState, ask, purge_offline},
    replay::Watch,
};
use serde_json::Value;

use crate::{failure::Failure, output, watch::Bar};

/// What the engine takes at most besides waiting for leases.
const WORK: Duration = Duration::from_secs(660);

/// Remove all chunks of a model, of a tenant's salt, or of both together.
///
/// Asks the running engine if one answers on the configuration's socket, else removes from the directories. Exit code 0:
/// nothing of it is left. 1: some is left (leased, unreadable), or --dry-run found some. 2: the arguments, the
/// configuration, or an engine that runs and has no socket.
#[derive(Args)]
#[command(group = clap::ArgGroup::new("what").required(true).multiple(true).args(["model", "salt"]))]
pub(crate) struct Purge {
    /// Engine configuration, TOML or JSON.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Model identity, as in the namespace, exactly.
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Cache salt, exactly; "" for chunks without a tenant.
    #[arg(long, value_name = "TEXT")]
    salt: Option<String>,
    /// Only count.
    #[arg(long)]
    dry_run: bool,
    /// How long chunks that are leased in a running engine are waited for.
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    wait: u64,
    /// JSON instead of text.
    #[arg(long)]
    json: bool,
}

impl Purge {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let config = Config::from_file(&self.config)?;
        let mut selector = Selector::default();
        selector.model.clone_from(&self.model);
        selector.salt = self.salt.as_ref().map(|salt| salt.clone().into_bytes());
        if let Some(socket) = &config.engine.socket
            && ask(socket, "stats", Duration::from_secs(5)).is_ok()
        {
            return self.live(&config, socket, selector);
        }
        let bar = Bar::new(0);
        let mut offline =
            Offline::open(config.clone()).map_err(|error| Failure::held(error, &config))?;
        bar.set_steps(offline.stats().tiers.iter().map(|tier| tier.chunks).sum());
        bar.phase("chunks looked at");
        let report = purge_offline(&mut offline, &selector, self.dry_run, &mut || bar.step());
        bar.done();
        let report = report?;
        if self.json {
            output::print_json(&report)?;
        } else {
            output::print(&offline_text(&report))?;
        }
        self.verdict(report.is_complete())
    }

    fn live(&self, config: &Config, socket: &Path, selector: Selector) -> Result<(), Failure> {
        let mut request = PurgeRequest::new(selector.clone());
        request.dry_run = self.dry_run;
        request.wait_ms = self.wait.saturating_mul(1_000);
        let line = serde_json::to_string(&request).map_err(|it| Failure::failed(it.to_string()))?;
        let deadline = WORK + Duration::from_secs(self.wait);
        let answer = ask(socket, &format!("purge {line}"), deadline).map_err(|error| {
            Failure::failed(format!("no answer on {}: {error}", socket.display()))
        })?;
        let mut value: Value = serde_json::from_str(&answer)
            .map_err(|error| Failure::failed(format!("the engine's answer is no JSON: {error}")))?;
        if let Some(error) = value["error"].as_str() {
            return Err(Failure::failed(format!("the engine refuses: {error}")));
        }
        // The engine knows of a shared directory what it has met there; the rest is removed here.
        let mut beside = Offline::open_beside(config.clone())?;
        let directories = purge_offline(&mut beside, &selector, self.dry_run, &mut || true)?;
        if self.json {
            value["directories"] = serde_json::to_value(&directories)
                .map_err(|error| Failure::failed(error.to_string()))?;
            output::print(&(serde_json::to_string_pretty(&value).unwrap_or(answer) + "\n"))?;
        } else {
            output::print(&(live_text(&value) + &offline_text(&directories)))?;
        }
        self.verdict(value["complete"] == true && directories.is_complete())
    }

    fn verdict(&self, complete: bool) -> Result<(), Failure> {
        match (complete, self.dry_run) {
            (true, _) => Ok(()),
            (false, true) => Err(Failure::failed("there is something to purge; see above")),
            (false, false) => Err(Failure::failed("not everything was purged; see above")),
        }
    }
}

/// Of a running engine's configuration: its shared directories.
fn offline_text(report: &OfflinePurge) -> String {
    let line = |tier: &kv_connector::inspect::TierPurgeOffline| match tier.state {
        Some(TierState::Opened) => format!(
            "directory of {}: {} of {} chunks selected ({} bytes), {} removed, {} left, {} unreadable\n",
            tier.name,
            tier.matched_chunks,
            tier.chunks,
            tier.matched_bytes,
            tier.removed_chunks,
            if report.dry_run { tier.matched_chunks } else { tier.left_chunks },
            tier.unknown_chunks,
        ),
        _ => format!("tier {}: nothing there\n", tier.name),
    };
    report.tiers.iter().map(line).collect()
}

fn live_text(report: &Value) -> String {
    let tiers = report["tiers"].as_array().into_iter().flatten();
    let mut text: String = tiers
        .map(|tier| {
            format!(
                "tier {}: {} of {} chunks selected ({} bytes), {} removed, {} leased, {} unreadable\n",
                tier["name"].as_str().unwrap_or("?"),
                tier["matched_chunks"],
                tier["chunks"],
                tier["matched_bytes"],
                tier["removed_chunks"],
                tier["leased_chunks"],
                tier["unknown_chunks"],
            )
        })
        .collect();
    text += &format!("host cache: {} removed\n", report["host_cache_chunks"]);
    text
}
