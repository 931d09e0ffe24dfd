//! Numbered storage: a number finds its value without hashing, and no number is ever used twice.

/// The low bits of a number are the slot, the others count how often the slot was used. The topmost bit stays clear, so that whoever
/// turns an engine can mark numbers of its own by it.
const SLOT_BITS: u32 = 20;
const SLOT_MASK: u64 = (1 << SLOT_BITS) - 1;

pub(super) const SLAB_MAX: usize = 1 << SLOT_BITS;

#[derive(Debug)]
pub(super) struct Slab<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
}

#[derive(Debug)]
struct Slot<T> {
    uses: u64,
    value: Option<T>,
}

impl<T> Slab<T> {
    pub fn new() -> Slab<T> {
        Slab {
            slots: Vec::new(),
            free: Vec::new(),
        }
    }

    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub fn is_full(&self) -> bool {
        self.len() >= SLAB_MAX
    }

    /// # Panics
    /// When full.
    pub fn insert(&mut self, value: T) -> u64 {
        let slot = match self.free.pop() {
            Some(slot) => slot as usize,
            None => {
                assert!(self.slots.len() < SLAB_MAX, "a slab that is full");
                self.slots.push(Slot { uses: 0, value: None });
                self.slots.len() - 1
            }
        };
        let entry = &mut self.slots[slot];
        entry.value = Some(value);
        entry.uses << SLOT_BITS | slot as u64
    }

    pub fn get(&self, number: u64) -> Option<&T> {
        let slot = self.slots.get((number & SLOT_MASK) as usize)?;
        if slot.uses == number >> SLOT_BITS {
            slot.value.as_ref()
        } else {
            None
        }
    }

    pub fn get_mut(&mut self, number: u64) -> Option<&mut T> {
        let slot = self.slots.get_mut((number & SLOT_MASK) as usize)?;
        if slot.uses == number >> SLOT_BITS {
            slot.value.as_mut()
        } else {
            None
        }
    }

    pub fn remove(&mut self, number: u64) -> Option<T> {
        let index = (number & SLOT_MASK) as usize;
        let slot = self.slots.get_mut(index)?;
        if slot.uses != number >> SLOT_BITS {
            return None;
        }
        let value = slot.value.take()?;
        slot.uses += 1;
        self.free.push(index as u32);
        Some(value)
    }

    /// Drops a value where it stands.
    pub fn discard(&mut self, number: u64) {
        let index = (number & SLOT_MASK) as usize;
        if let Some(slot) = self.slots.get_mut(index)
            && slot.uses == number >> SLOT_BITS
            && slot.value.is_some()
        {
            slot.value = None;
            slot.uses += 1;
            self.free.push(index as u32);
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = (u64, &T)> {
        self.slots.iter().enumerate().filter_map(|(i, slot)| {
            let value = slot.value.as_ref()?;
            Some((slot.uses << SLOT_BITS | i as u64, value))
        })
    }
}
