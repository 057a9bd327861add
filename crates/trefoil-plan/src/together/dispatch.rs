//! Who runs next when requests of several models arrive by themselves: one rule, used by the runtime that serves and by the
//! planner that predicts what serving gives.
//!
//! **The rule.** One inference of a stream runs at a time, and it holds its resources until it is finished; nothing is
//! interrupted. Among the streams' oldest waiting requests the higher priority goes first, then the earlier deadline (requests
//! without one come after all others), then the earlier arrival, then the stream given first. A request that cannot start
//! because a resource is busy keeps its other resources free of requests that rank after it, so that what needs many
//! resources is not put off for ever by what needs few.

use std::collections::{BTreeSet, VecDeque};
use trefoil_core::Resource;

/// Requests of one model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DispatchStream {
    /// What one inference holds.
    pub resources: BTreeSet<Resource>,
    /// Higher goes first.
    pub priority: i32,
    /// From arrival to deadline, in nanoseconds.
    pub deadline_ns: Option<u64>,
}

/// A request that may start now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Started {
    /// Its stream.
    pub stream: usize,
    /// When it arrived, in nanoseconds.
    pub arrival_ns: u64,
}

/// Waiting and running requests of several streams. Memory is bounded by the limit of waiting requests.
#[derive(Debug, Clone)]
pub struct Dispatcher {
    streams: Vec<DispatchStream>,
    /// Whether inferences that share a resource exclude each other.
    exclusive: bool,
    /// Most requests of one stream that wait.
    limit: usize,
    running: Vec<bool>,
    waiting: Vec<VecDeque<u64>>,
    busy: BTreeSet<Resource>,
}

impl Dispatcher {
    /// Nothing waits and nothing runs. With `exclusive` unset resources play no part: every stream runs when it can. At most
    /// `limit` requests of a stream wait.
    pub fn new(streams: Vec<DispatchStream>, exclusive: bool, limit: usize) -> Self {
        let count = streams.len();
        Self {
            streams,
            exclusive,
            limit,
            running: vec![false; count],
            waiting: vec![VecDeque::new(); count],
            busy: BTreeSet::new(),
        }
    }

    /// A request arrives; `false` if too many of its stream wait already, and it is turned away.
    pub fn arrive(&mut self, stream: usize, arrival_ns: u64) -> bool {
        let waiting = &mut self.waiting[stream];
        if waiting.len() >= self.limit {
            return false;
        }
        waiting.push_back(arrival_ns);
        true
    }

    /// The next request that starts now, which takes its resources; call again until there is none.
    pub fn start(&mut self) -> Option<Started> {
        let mut oldest: Vec<Started> = (0..self.streams.len())
            .filter(|&stream| !self.running[stream])
            .filter_map(|stream| Some(Started { stream, arrival_ns: *self.waiting[stream].front()? }))
            .collect();
        oldest.sort_by_key(|request| self.rank(*request));
        let mut kept: BTreeSet<&Resource> = BTreeSet::new();
        let found = oldest.into_iter().find(|request| {
            let wanted = &self.streams[request.stream].resources;
            let free = !self.exclusive || wanted.iter().all(|one| !self.busy.contains(one) && !kept.contains(one));
            if !free {
                kept.extend(wanted);
            }
            free
        })?;
        self.waiting[found.stream].pop_front();
        self.running[found.stream] = true;
        if self.exclusive {
            self.busy.extend(self.streams[found.stream].resources.iter().cloned());
        }
        Some(found)
    }

    fn rank(&self, request: Started) -> (std::cmp::Reverse<i32>, u64, u64, usize) {
        let stream = &self.streams[request.stream];
        let deadline = stream.deadline_ns.map_or(u64::MAX, |deadline| request.arrival_ns.saturating_add(deadline));
        (std::cmp::Reverse(stream.priority), deadline, request.arrival_ns, request.stream)
    }

    /// The stream's running inference is finished; its resources are free.
    pub fn finish(&mut self, stream: usize) {
        debug_assert!(self.running[stream], "stream {stream} runs nothing");
        self.running[stream] = false;
        if self.exclusive {
            for resource in &self.streams[stream].resources {
                self.busy.remove(resource);
            }
        }
    }

    /// Requests of a stream that wait.
    pub fn waiting(&self, stream: usize) -> usize {
        self.waiting[stream].len()
    }

    /// Drops all waiting requests of a stream; how many there were.
    pub fn clear(&mut self, stream: usize) -> usize {
        let count = self.waiting[stream].len();
        self.waiting[stream].clear();
        count
    }

    /// Whether nothing runs.
    pub fn is_idle(&self) -> bool {
        self.running.iter().all(|running| !running)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(cores: &[u32], priority: i32, deadline_ns: Option<u64>) -> DispatchStream {
        DispatchStream { resources: cores.iter().copied().map(Resource::Core).collect(), priority, deadline_ns }
    }

    fn started(dispatcher: &mut Dispatcher) -> Vec<usize> {
        std::iter::from_fn(|| dispatcher.start().map(|request| request.stream)).collect()
    }

    #[test]
    fn disjoint_streams_run_at_once_and_shared_resources_exclude() {
        let streams = vec![stream(&[0], 0, None), stream(&[1], 0, None), stream(&[0, 1], 0, None)];
        let mut dispatcher = Dispatcher::new(streams, true, 8);
        for (at, stream) in [2, 0, 1].into_iter().enumerate() {
            assert!(dispatcher.arrive(stream, at as u64));
        }
        assert_eq!(started(&mut dispatcher), [2]);
        dispatcher.finish(2);
        assert_eq!(started(&mut dispatcher), [0, 1]);
    }

    #[test]
    fn priority_beats_deadline_beats_arrival() {
        let streams = vec![stream(&[0], 0, None), stream(&[0], 0, Some(100)), stream(&[0], 1, None)];
        let mut dispatcher = Dispatcher::new(streams, true, 8);
        for stream in 0..3 {
            dispatcher.arrive(stream, stream as u64);
        }
        let mut order = Vec::new();
        while let Some(request) = dispatcher.start() {
            order.push(request.stream);
            dispatcher.finish(request.stream);
        }
        assert_eq!(order, [2, 1, 0]);
    }

    #[test]
    fn wide_requests_are_not_starved_by_narrow_ones() {
        let streams = vec![stream(&[0], 0, None), stream(&[1], 0, None), stream(&[0, 1], 0, None)];
        let mut dispatcher = Dispatcher::new(streams, true, 8);
        dispatcher.arrive(0, 0);
        assert_eq!(started(&mut dispatcher), [0]);
        dispatcher.arrive(2, 1);
        dispatcher.arrive(1, 2);
        // Core 1 is free, but the older request needs it next.
        assert_eq!(started(&mut dispatcher), [] as [usize; 0]);
        dispatcher.finish(0);
        assert_eq!(started(&mut dispatcher), [2]);
    }

    #[test]
    fn a_full_queue_turns_requests_away() {
        let mut dispatcher = Dispatcher::new(vec![stream(&[0], 0, None)], true, 2);
        assert!(dispatcher.arrive(0, 0));
        assert_eq!(started(&mut dispatcher), [0]);
        assert!(dispatcher.arrive(0, 1) && dispatcher.arrive(0, 2) && !dispatcher.arrive(0, 3));
        assert_eq!((dispatcher.waiting(0), dispatcher.clear(0), dispatcher.waiting(0)), (2, 2, 0));
        assert!(!dispatcher.is_idle());
        dispatcher.finish(0);
        assert!(dispatcher.is_idle() && dispatcher.start().is_none());
    }

    #[test]
    fn without_exclusion_every_stream_runs() {
        let mut dispatcher = Dispatcher::new(vec![stream(&[0], 0, None), stream(&[0], 0, None)], false, 2);
        dispatcher.arrive(0, 0);
        dispatcher.arrive(0, 1);
        dispatcher.arrive(1, 2);
        assert_eq!(started(&mut dispatcher), [0, 1]);
    }
}
