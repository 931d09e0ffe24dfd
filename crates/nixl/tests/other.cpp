// Another back end, which does nothing: its table is what src/interface.rs reads. -DINSERTED, -DAPPENDED and -DRETYPED alter the interface.
#include "nixl.hpp"

struct nixlOtherEngine : nixlBackendEngine {
    using nixlBackendEngine::nixlBackendEngine;
    bool supportsRemote() const override;
    bool supportsLocal() const override { return false; }
    bool supportsNotif() const override { return false; }
    std::vector<nixl_mem_t> getSupportedMems() const override { return {}; }
    nixl_status_t registerMem(const nixlBlobDesc &, const nixl_mem_t &, nixlBackendMD *&) override { return NIXL_SUCCESS; }
    nixl_status_t deregisterMem(nixlBackendMD *) override { return NIXL_SUCCESS; }
    nixl_status_t connect(const std::string &) override { return NIXL_SUCCESS; }
    nixl_status_t disconnect(const std::string &) override { return NIXL_SUCCESS; }
    nixl_status_t unloadMD(nixlBackendMD *) override { return NIXL_SUCCESS; }
    nixl_status_t prepXfer(const nixl_xfer_op_t &, const Metas &, const Metas &, const std::string &, nixlBackendReqH *&,
                           const nixlBackendOptionalArgs *) const override {
        return NIXL_SUCCESS;
    }
    nixl_status_t postXfer(const nixl_xfer_op_t &, const Metas &, const Metas &, const std::string &, nixlBackendReqH *&,
                           const nixlBackendOptionalArgs *) const override {
        return NIXL_SUCCESS;
    }
    nixl_status_t checkXfer(nixlBackendReqH *) const override { return NIXL_SUCCESS; }
#ifdef RETYPED
    nixl_status_t releaseReqH(nixlBackendReqH *, bool) const override { return NIXL_SUCCESS; }
#else
    nixl_status_t releaseReqH(nixlBackendReqH *) const override { return NIXL_SUCCESS; }
#endif
};
bool nixlOtherEngine::supportsRemote() const { return false; }
