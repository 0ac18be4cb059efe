//! How many reads a tier keeps in flight.

/// Operations in flight against a limit. Single owner: the tier's thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    limit: u32,
    in_flight: u32,
}

impl Window {
    /// Nothing in flight; at most `limit` operations at once, at least 1.
    #[must_use]
    pub fn new(limit: u32) -> Self {
        Self { limit: limit.max(1), in_flight: 0 }
    }

    /// How many more operations may start now.
    #[must_use]
    pub fn room(&self) -> u32 {
        self.limit.saturating_sub(self.in_flight)
    }

    /// Operations in flight.
    #[must_use]
    pub fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// The limit.
    #[must_use]
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// Whether nothing is in flight.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.in_flight == 0
    }

    /// Changes the limit, to at least 1. Operations in flight beyond a lower limit run on; none
    /// starts until they are below it.
    pub fn set_limit(&mut self, limit: u32) {
        self.limit = limit.max(1);
    }

    /// Counts an operation as started if there is room.
    #[must_use]
    pub fn start(&mut self) -> bool {
        let room = self.room() > 0;
        self.in_flight += u32::from(room);
        room
    }

    /// Counts an operation as ended. One that was expired ends when its completion comes in, for
    /// until then it occupies the device.
    pub fn end(&mut self) {
        debug_assert!(self.in_flight > 0, "an operation ended that had not started");
        self.in_flight = self.in_flight.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starts_no_more_than_the_limit() {
        let mut window = Window::new(2);
        assert!(window.start() && window.start());
        assert!(!window.start());
        assert_eq!((window.in_flight(), window.room()), (2, 0));
        window.end();
        assert!(window.start());
    }

    #[test]
    fn a_lower_limit_waits_for_what_is_in_flight() {
        let mut window = Window::new(3);
        assert!(window.start() && window.start() && window.start());
        window.set_limit(0);
        assert_eq!(window.limit(), 1);
        window.end();
        window.end();
        assert!(!window.start());
        window.end();
        assert!(window.is_idle() && window.start());
    }
}
