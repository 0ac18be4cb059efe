//! Opening: the directory is made or recognised, and the way to publish is tried out, on a thread that may hang.

use std::{
    fs,
    io::{self, Write},
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    process,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64},
        mpsc,
    },
    thread,
};

use nix::sys::eventfd::{EfdFlags, EventFd};

use super::{
    SharedConfig, SharedTier,
    config::{OpenAs, PublishBy},
    index::Index,
    inspect::failed,
    jobs::hung,
    lease::{Beat, Figures, Keeper, write_once},
    media::{Bad, MARKER_BYTES, Marker, VERSION},
    paths,
    pool::{Lane, LaneId},
    publish::{self, Place},
    space::Space,
    survey::check_root,
};
use crate::{ErrorKind, TierError, TierStats};

/// What opening found.
struct Prepared {
    place: Arc<Place>,
    /// None of whoever only looks.
    keeper: Option<Keeper>,
    beat: Beat,
    fallbacks: Vec<String>,
}

impl SharedTier {
    /// Opens the directory, on every node that mounts it. Fails with `Newer` if a later version made it, and after
    /// [`open_wait`](SharedConfig::open_wait) if the mount does not answer. Nothing is listed: the chunks of others are
    /// found when they are looked for. To look ([`OpenAs`]) all is listed, for as long as files keep coming.
    pub fn open(config: SharedConfig, now_ns: u64) -> Result<Self, TierError> {
        config.check()?;
        let figures = Arc::new(Mutex::new(Figures::default()));
        let Prepared { place, keeper, beat, fallbacks } = prepare_in_time(&config, &figures)?;
        let system = |call| failed(call, &config.directory, 0, 0);
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(|errno| system("eventfd")(errno.into()))?;
        let (wake, (sender, messages)) = (Arc::new(wake), mpsc::channel());
        let lane =
            |id, threads| Lane::start(id, threads, &place, &sender, &wake).map_err(system("spawn"));
        let data = lane(LaneId::Data, config.threads)?;
        let small = lane(LaneId::Small, config.lookup_threads)?;
        let keeper = keeper.map(|keeper| keeper.run(sender, Arc::clone(&wake)));
        let keeper = keeper.transpose().map_err(system("spawn"))?;
        let mut tier = Self {
            owner_pid: process::id(),
            index: Index::new(config.absent_max),
            space: Space::new(config.capacity_bytes, beat.figures),
            place,
            lanes: Some((data, small)),
            keeper,
            messages,
            wake,
            wake_raised: false,
            figures,
            beat: Beat::default(),
            beats: 0,
            counted_at_beat: 0,
            trim: false,
            temporaries: Default::default(),
            reads: Default::default(),
            writes: Default::default(),
            running: Default::default(),
            readers: Default::default(),
            writing: Default::default(),
            doomed: Default::default(),
            looks: Default::default(),
            next_key: 0,
            ops: 0,
            hold_writes: false,
            released: false,
            closed: false,
            stats: TierStats { fallbacks, ..TierStats::default() },
            detail: Default::default(),
            findings: Default::default(),
            config,
        };
        match tier.config.open_as {
            OpenAs::Node => tier.take_beat(beat, now_ns),
            OpenAs::Looker | OpenAs::Mender => tier.survey()?,
        }
        Ok(tier)
    }
}

/// The calls of opening can hang as well: they run on a thread that is waited for, then left to itself.
fn prepare_in_time(
    config: &SharedConfig,
    figures: &Arc<Mutex<Figures>>,
) -> Result<Prepared, TierError> {
    let (sender, prepared) = mpsc::channel();
    let (theirs, figures) = (config.clone(), Arc::clone(figures));
    thread::Builder::new()
        .name("kv-shared-open".to_owned())
        .spawn(move || {
            // Nobody waits any more if it took too long.
            let _ = sender.send(prepare(&theirs, figures));
        })
        .map_err(failed("spawn", &config.directory, 0, 0))?;
    let waited = prepared.recv_timeout(config.open_wait);
    waited.unwrap_or_else(|_| Err(hung("open", &config.directory, 0)))
}

fn prepare(config: &SharedConfig, figures: Arc<Mutex<Figures>>) -> Result<Prepared, TierError> {
    let mut place = Place {
        root: config.directory.clone(),
        modes: config.modes,
        node: config.node,
        publish: config.publish.unwrap_or(PublishBy::Link),
        chmod: false,
        hold: AtomicBool::new(false),
        attempts: AtomicU64::new(0),
        looked_at: AtomicU64::new(0),
    };
    if config.open_as != OpenAs::Node {
        check_root(&place.root)?;
        let (place, beat, fallbacks) = (Arc::new(place), Beat::default(), Vec::new());
        return Ok(Prepared { place, keeper: None, beat, fallbacks });
    }
    make_root(&place)?;
    // Before anything is written: a later version's directory is left as it is.
    let is_new = read_marker(&place.root)?.is_none();
    let mut fallbacks = match try_out(&mut place, config.publish.is_none()) {
        // It can still be read, and room may come.
        Err(error) if !is_new && error.kind() == ErrorKind::NoSpace => {
            (place.chmod, place.publish) = (true, config.publish.unwrap_or(PublishBy::Link));
            vec![format!("the file system is full: publishing by {:?} is not tried", place.publish)]
        }
        tried => tried?,
    };
    if is_new {
        make_marker(&place)?;
    }
    let place = Arc::new(place);
    let mut keeper = Keeper::new(Arc::clone(&place), config.lease_ttl, figures);
    let beat = keeper.beat();
    if beat.newer {
        fallbacks.push("a later version leads here: this node never counts or collects".into());
    }
    Ok(Prepared { place, keeper: Some(keeper), beat, fallbacks })
}

/// What the mount makes of modes and which way to publish works on it; what does not work.
fn try_out(place: &mut Place, choose: bool) -> Result<Vec<String>, TierError> {
    place.chmod = modes_are_cut(place)?;
    let mut refused = Vec::new();
    if choose {
        (place.publish, refused) = publish::choose(place)?;
    }
    Ok(refused)
}

/// The directories above are made as well, with the same permissions.
fn make_root(place: &Place) -> Result<(), TierError> {
    let missing: Vec<&Path> = place
        .root
        .ancestors()
        .take_while(|path| !path.as_os_str().is_empty() && !path.exists())
        .collect();
    for path in missing.into_iter().rev() {
        place.make_directory(path).map_err(failed("mkdir", path, 0, 0))?;
        let mode = place.modes.for_directory();
        fs::set_permissions(path, fs::Permissions::from_mode(mode))
            .map_err(failed("chmod", path, 0, 0))?;
    }
    Ok(())
}

fn read_marker(root: &Path) -> Result<Option<Marker>, TierError> {
    let path = root.join(paths::MARKER);
    let bytes = match fs::read(&path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed("read", &path, 0, MARKER_BYTES as u64)(error)),
    };
    match Marker::parse(&bytes) {
        Ok(marker) => Ok(Some(marker)),
        Err(Bad::Newer(found)) => Err(TierError::Newer { path, found, known: VERSION }),
        Err(Bad::Damaged) => Err(TierError::Config {
            field: "directory",
            problem: format!("{} is damaged", path.display()),
            fix: "remove that file if the directory is KVBraid's, or name another directory".into(),
        }),
    }
}

/// Of nodes that open a new directory at once the first one's marker stays.
fn make_marker(place: &Place) -> Result<(), TierError> {
    let mut store = [0; 16];
    store[..8].copy_from_slice(&place.node.to_le_bytes());
    let path = place.root.join(paths::MARKER);
    write_once(place, "marker", &path, &Marker { store }.encode())?;
    match read_marker(&place.root)? {
        Some(_) => Ok(()),
        None => {
            Err(failed("publish", &path, 0, MARKER_BYTES as u64)(io::ErrorKind::NotFound.into()))
        }
    }
}

fn modes_are_cut(place: &Place) -> Result<bool, TierError> {
    let path: PathBuf = paths::root_temporary(&place.root, "mode", place.node);
    let made = place.make_file(&path).and_then(|mut file| {
        file.write_all(&[0])?;
        file.metadata()
    });
    let _ = fs::remove_file(&path);
    let mode = made.map_err(failed("open", &path, 0, 0))?.mode() & 0o777;
    let probe = paths::root_temporary(&place.root, "modes", place.node);
    let made = place.make_directory(&probe).and_then(|()| fs::metadata(&probe));
    let _ = fs::remove_dir(&probe);
    let directory = made.map_err(failed("mkdir", &probe, 0, 0))?.mode() & 0o7777;
    Ok(mode != place.modes.for_file() || directory != place.modes.for_directory())
}
