//! Optional encryption. Both ends prove who they are with certificates.
//!
//! Encrypted bytes cannot go straight between the socket and registered memory: they pass through a bounded buffer of the
//! TLS library on each side, which costs a copy and the cipher.

use std::fmt;
use std::io::{self, Read, Write};
use std::sync::Arc;

use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection};

use super::socket::{Socket, Vectors};

/// Certificates in DER form.
#[derive(Clone)]
pub struct TlsOptions {
    /// This end's certificate, and those between it and a root.
    pub certificates: Vec<Vec<u8>>,
    /// The private key of the first certificate (PKCS#8, PKCS#1 or SEC1).
    pub key: Vec<u8>,
    /// Whom to believe.
    pub roots: Vec<Vec<u8>>,
    /// The name that the peers' certificates carry.
    pub server_name: String,
}

impl fmt::Debug for TlsOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The key stays out of logs.
        write!(f, "TlsOptions({})", self.server_name)
    }
}

/// What connections are made from.
#[derive(Clone, Debug)]
pub(super) struct TlsConfig {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    name: ServerName<'static>,
}

/// Plaintext and ciphertext that may wait in a connection, each.
const BUFFER_BYTES: usize = 256 << 10;

impl TlsConfig {
    pub(super) fn new(options: &TlsOptions) -> Result<TlsConfig, rustls::Error> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut roots = RootCertStore::empty();
        for root in &options.roots {
            roots.add(CertificateDer::from(root.clone()))?;
        }
        let roots = Arc::new(roots);
        let chain: Vec<_> = options
            .certificates
            .iter()
            .map(|c| CertificateDer::from(c.clone()))
            .collect();
        let key = PrivateKeyDer::try_from(options.key.clone()).map_err(|e| rustls::Error::General(String::from(e)))?;
        let name =
            ServerName::try_from(options.server_name.clone()).map_err(|e| rustls::Error::General(e.to_string()))?;
        let client = ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_root_certificates(roots.clone())
            .with_client_auth_cert(chain.clone(), key.clone_key())?;
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider.clone())
            .build()
            .map_err(|e| rustls::Error::General(e.to_string()))?;
        let server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, key)?;
        Ok(TlsConfig {
            client: Arc::new(client),
            server: Arc::new(server),
            name,
        })
    }

    pub(super) fn initiate(&self, socket: Socket) -> io::Result<TlsStream> {
        let session = ClientConnection::new(self.client.clone(), self.name.clone()).map_err(io::Error::other)?;
        Ok(TlsStream::new(socket, session.into()))
    }

    pub(super) fn accept(&self, socket: Socket) -> io::Result<TlsStream> {
        let session = ServerConnection::new(self.server.clone()).map_err(io::Error::other)?;
        Ok(TlsStream::new(socket, session.into()))
    }
}

#[derive(Debug)]
pub(super) struct TlsStream {
    socket: Socket,
    session: Connection,
    /// Decrypted bytes that nobody has taken yet.
    plaintext: usize,
}

impl TlsStream {
    fn new(socket: Socket, mut session: Connection) -> TlsStream {
        session.set_buffer_limit(Some(BUFFER_BYTES));
        TlsStream {
            socket,
            session,
            plaintext: 0,
        }
    }

    pub(super) fn socket(&self) -> &Socket {
        &self.socket
    }

    pub(super) fn holds_plaintext(&self) -> bool {
        self.plaintext > 0
    }

    pub(super) fn send(&mut self, vectors: &Vectors) -> io::Result<usize> {
        self.flush()?;
        let mut taken = 0;
        let mut writer = self.session.writer();
        let handed_over = vectors.hand_over(|bytes| {
            let n = writer.write(bytes)?;
            taken += n;
            Ok(n == bytes.len())
        });
        self.flush()?;
        if taken == 0 {
            handed_over?;
            return Err(io::ErrorKind::WouldBlock.into());
        }
        // What is in the way of the rest is told the next time.
        Ok(taken)
    }

    /// Pushes ciphertext out; whether all of it went.
    pub(super) fn flush(&mut self) -> io::Result<bool> {
        while self.session.wants_write() {
            match self.session.write_tls(&mut &*self.socket) {
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(true)
    }

    pub(super) fn receive(&mut self, vectors: &mut Vectors) -> io::Result<usize> {
        let mut copy = [0u8; 16 << 10];
        let want = vectors.bytes().min(copy.len());
        let n = self.take(&mut copy[..want])?;
        Ok(vectors.fill(&copy[..n]))
    }

    pub(super) fn discard(&mut self, len: usize) -> io::Result<usize> {
        let mut scrap = [0u8; 16 << 10];
        let want = len.min(scrap.len());
        self.take(&mut scrap[..want])
    }

    fn take(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.plaintext == 0 {
            match self.session.read_tls(&mut &*self.socket) {
                Ok(0) => return Ok(0),
                Ok(_) => {}
                Err(e) => return Err(e),
            }
            let state = self
                .session
                .process_new_packets()
                .map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e));
            // What the handshake has to say goes out at once, an alert included: nothing else would push it.
            self.flush()?;
            self.plaintext = state?.plaintext_bytes_to_read();
        }
        match self.session.reader().read(into) {
            Ok(n) => {
                self.plaintext = self.plaintext.saturating_sub(n);
                Ok(n)
            }
            Err(e) => Err(e),
        }
    }
}
