//! The smaller server by itself, for tests in other languages and for trying things out: `weft-testing-s3 PORT DIRECTORY`, with a bucket `blocks` in it.

fn main() {
    let mut arguments = std::env::args().skip(1);
    let (Some(port), Some(root)) = (arguments.next(), arguments.next()) else {
        eprintln!("weft-testing-s3 PORT DIRECTORY");
        std::process::exit(2);
    };
    let port: u16 = port.parse().expect("a port");
    std::fs::create_dir_all(std::path::Path::new(&root).join(weft_testing_s3::BUCKET)).expect("a folder");
    weft_testing_s3::serve_at(port, root.into());
}
