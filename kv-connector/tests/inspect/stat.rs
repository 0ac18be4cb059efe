//! `kvbraid stat`.

use std::{os::unix::net::UnixListener, thread};

use crate::common::*;

#[test]
fn without_an_engine_it_shows_what_the_directories_hold_and_changes_nothing() {
    let place = Place::new();
    place.filled_with(&keys("m", "", 5));
    let before = place.contents("one");
    let (code, stats) = place.json(&["stat"]);
    assert_eq!((code, &stats["offline"]), (0, &true.into()), "{stats}");
    let one = &stats["tiers"][0];
    assert_eq!((&one["chunks"], &one["state"]), (&5.into(), &"opened".into()), "{one}");
    assert_eq!(one["payload_bytes"], 5 * PAYLOAD_BYTES);
    assert_eq!(
        (&one["capacity_bytes"], one["window"].is_null()),
        (&(64 << 20).into(), true),
        "{one}"
    );
    assert!(one["used_bytes"].as_u64().unwrap() > 5 * (PAYLOAD_BYTES as u64), "{one}");
    let text = String::from_utf8(place.kvbraid(&["stat"]).stdout).unwrap();
    assert!(text.contains("none answers") && text.contains("chunks     5"), "{text}");
    assert!(place.contents("one") == before);
    assert_eq!(place.kvbraid(&["stat", "--prometheus"]).status.code(), Some(1));
}

#[test]
fn with_an_engine_it_shows_what_that_counts() {
    let place = Place::new();
    let socket = place.path("engine.sock");
    place.configure(&format!("socket = \"{}\"", socket.display()));
    let engine = place.engine();
    let known = keys("m", "", 5);
    store(&engine, &known);
    served(&engine, &keys("m", "", 7));
    let (code, stats) = place.json(&["stat"]);
    assert_eq!((code, &stats["hits"], &stats["misses"]), (0, &5.into(), &2.into()), "{stats}");
    assert_eq!(stats["miss_reasons"]["not_held"], 2, "{stats}");
    let text = String::from_utf8(place.kvbraid(&["stat"]).stdout).unwrap();
    for words in
        ["5 of 7 chunks", "2 (not held 2)", "huge pages", "tier one (serving)", "window     7"]
    {
        assert!(text.contains(words), "no `{words}` in\n{text}");
    }
    let text = String::from_utf8(place.kvbraid(&["stat", "--prometheus"]).stdout).unwrap();
    assert!(text.contains("kvbraid_wanted_chunks_total 7"), "{text}");
}

#[test]
fn an_engine_without_a_socket_is_named() {
    let place = Place::new();
    let engine = place.engine();
    let output = place.kvbraid(&["stat"]);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("in use by another process") && error.contains("no socket"), "{error}");
    // Nor does it help to configure one that the engine does not know.
    let socket = place.path("other.sock");
    place.configure(&format!("socket = \"{}\"", socket.display()));
    let error = place.kvbraid(&["stat"]).stderr;
    let error = String::from_utf8_lossy(&error).into_owned();
    assert!(error.contains("other.sock") && error.contains("nobody answers"), "{error}");
    drop(engine);
}

#[test]
fn whoever_answers_the_socket_wrongly_is_not_taken_for_nobody() {
    let place = Place::new();
    place.filled_with(&keys("m", "", 1));
    let socket = place.path("engine.sock");
    place.configure(&format!("socket = \"{}\"", socket.display()));
    let listener = UnixListener::bind(&socket).unwrap();
    let mute = thread::spawn(move || drop(listener.accept()));
    let output = place.kvbraid(&["stat"]);
    mute.join().unwrap();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("no answer on") && error.contains("engine.sock"), "{error}");
    // What a killed engine leaves answers nobody.
    let (code, stats) = place.json(&["stat"]);
    assert_eq!((code, &stats["offline"]), (0, &true.into()), "{stats}");
}
