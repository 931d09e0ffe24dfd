//! An initramfs is a cpio archive in the `newc` format; this writes one.

/// Kind and permissions of an entry, as in `st_mode`.
const DIRECTORY: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;

#[derive(Debug, Default)]
pub struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

impl Archive {
    pub fn directory(&mut self, path: &str) {
        self.entry(path, DIRECTORY, &[]);
    }

    pub fn file(&mut self, path: &str, content: &[u8]) {
        self.entry(path, PROGRAM, content);
    }

    pub fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }

    fn entry(&mut self, path: &str, mode: u32, content: &[u8]) {
        self.entries += 1;
        let size = u32::try_from(content.len()).expect("a file of less than 4 GiB");
        let name_size = path.len() as u32 + 1;
        // Inode, mode, owner, group, links, time, size, device (2), device of a special file (2), length of the name, checksum.
        let fields = [self.entries, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, name_size, 0];
        self.bytes.extend(b"070701");
        for field in fields {
            self.bytes.extend(format!("{field:08x}").bytes());
        }
        self.bytes.extend(path.bytes().chain([0]));
        self.pad();
        self.bytes.extend(content);
        self.pad();
    }

    /// Names and contents end on multiples of four.
    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_start_on_multiples_of_four_and_say_how_long_they_are() {
        let mut archive = Archive::default();
        archive.directory("bin");
        archive.file("bin/init", b"hello");
        let bytes = archive.finish();
        let mut at = 0;
        let mut names = Vec::new();
        while at < bytes.len() {
            assert_eq!(&bytes[at..at + 6], b"070701");
            let field = |n: usize| {
                let digits = std::str::from_utf8(&bytes[at + 6 + n * 8..][..8]).unwrap();
                usize::from_str_radix(digits, 16).unwrap()
            };
            let (size, name) = (field(6), field(11));
            names.push(String::from_utf8(bytes[at + 110..at + 110 + name - 1].to_vec()).unwrap());
            let content = (at + 110 + name).next_multiple_of(4);
            if names.last().unwrap() == "bin/init" {
                assert_eq!(&bytes[content..content + size], b"hello");
            }
            at = (content + size).next_multiple_of(4);
        }
        assert_eq!(names, ["bin", "bin/init", "TRAILER!!!"]);
    }
}
