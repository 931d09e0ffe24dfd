//! A small table by ascending number: found by bisection, walked in order, as large as what it holds.

/// Values under numbers that are handed out in ascending order and never again.
#[derive(Debug)]
pub(super) struct Numbered<V>(Vec<(u32, V)>);

impl<V> Numbered<V> {
    pub(super) fn new() -> Numbered<V> {
        Numbered(Vec::new())
    }
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
    fn place(&self, number: u32) -> Result<usize, usize> {
        self.0.binary_search_by_key(&number, |(n, _)| *n)
    }
    pub(super) fn insert(&mut self, number: u32, value: V) {
        match self.place(number) {
            Ok(at) => self.0[at].1 = value,
            Err(at) => self.0.insert(at, (number, value)),
        }
    }
    pub(super) fn at(&self, number: u32) -> Option<&V> {
        self.place(number).ok().map(|at| &self.0[at].1)
    }
    pub(super) fn at_mut(&mut self, number: u32) -> Option<&mut V> {
        self.place(number).ok().map(|at| &mut self.0[at].1)
    }
    pub(super) fn remove(&mut self, number: u32) -> Option<V> {
        self.place(number).ok().map(|at| self.0.remove(at).1)
    }
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &V)> {
        self.0.iter().map(|(n, v)| (*n, v))
    }
}
