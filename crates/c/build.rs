//! Programs remember a library by the name that it gives itself; without one, those that were linked by path would remember the path.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libweft.so");
    // What dependencies would offer to C as well stays inside.
    println!("cargo::rustc-cdylib-link-arg=-Wl,--exclude-libs,ALL");
    println!("cargo::rerun-if-changed=build.rs");
}
