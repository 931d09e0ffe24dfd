//! A small table by ascending number: found by bisection, walked in order, as large as what it holds.

/// Values under numbers that are handed out in ascending order and never again.
#[derive(Debug)]
pub(crate) struct Numbered<V>(Vec<(u32, V)>);

impl<V> Numbered<V> {
    pub(crate) fn new() -> Numbered<V> {
        Numbered(Vec::new())
    }
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
    fn place(&self, number: u32) -> Result<usize, usize> {
        self.0.binary_search_by_key(&number, |(n, _)| *n)
    }
    pub(crate) fn insert(&mut self, number: u32, value: V) {
        match self.place(number) {
            Ok(at) => self.0[at].1 = value,
            Err(at) => self.0.insert(at, (number, value)),
        }
    }
    pub(crate) fn at(&self, number: u32) -> Option<&V> {
        self.place(number).ok().map(|at| &self.0[at].1)
    }
    pub(crate) fn at_mut(&mut self, number: u32) -> Option<&mut V> {
        self.place(number).ok().map(|at| &mut self.0[at].1)
    }
    pub(crate) fn at_or_insert(&mut self, number: u32, value: impl FnOnce() -> V) -> &mut V {
        let at = match self.place(number) {
            Ok(at) => at,
            Err(at) => {
                self.0.insert(at, (number, value()));
                at
            }
        };
        &mut self.0[at].1
    }
    pub(crate) fn remove(&mut self, number: u32) -> Option<V> {
        self.place(number).ok().map(|at| self.0.remove(at).1)
    }
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &V)> {
        self.0.iter().map(|(n, v)| (*n, v))
    }
}
