//! Certificates for tests.

use weft_fabric::tcp::TlsOptions;

/// One authority, and one certificate under it that both ends use.
pub fn certificates(name: &str) -> TlsOptions {
    let authority_key = rcgen::KeyPair::generate().expect("a key");
    let mut authority = rcgen::CertificateParams::new([]).expect("parameters");
    authority.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let root = authority.self_signed(&authority_key).expect("a root");
    let issuer = rcgen::Issuer::new(authority, authority_key);
    let key = rcgen::KeyPair::generate().expect("a key");
    let leaf = rcgen::CertificateParams::new([name.to_string()])
        .and_then(|params| params.signed_by(&key, &issuer))
        .expect("a certificate");
    TlsOptions {
        certificates: vec![leaf.der().to_vec()],
        key: key.serialize_der(),
        roots: vec![root.der().to_vec()],
        server_name: name.to_string(),
    }
}
