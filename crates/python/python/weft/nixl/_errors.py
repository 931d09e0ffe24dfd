"""What goes wrong, by the names that NIXL has for it. The text says more than NIXL's: what, with whom, and how far it came."""


class _NixlError(Exception):
    """What all of them are, so that they can be caught together."""


class nixlNotPostedError(_NixlError): ...


class nixlInvalidParamError(_NixlError): ...


class nixlBackendError(_NixlError): ...


class nixlNotFoundError(_NixlError): ...


class nixlMismatchError(_NixlError): ...


class nixlNotAllowedError(_NixlError): ...


class nixlRepostActiveError(_NixlError): ...


class nixlUnknownError(_NixlError): ...


class nixlNotSupportedError(_NixlError): ...


class nixlRemoteDisconnectError(_NixlError): ...


class nixlCancelledError(_NixlError): ...


class nixlNoTelemetryError(_NixlError): ...
