// NIXL's interface to its back ends, as a C++ compiler sees it: what src/abi.rs and src/stdcxx.rs are held against. Names are those of NIXL, because they are
// part of what the linker sees; everything that a back end does not touch is left out.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

enum nixl_mem_t { DRAM_SEG, VRAM_SEG, BLK_SEG, OBJ_SEG, FILE_SEG };
enum nixl_xfer_op_t { NIXL_READ, NIXL_WRITE };
enum nixl_status_t {
    NIXL_IN_PROG = 1,
    NIXL_SUCCESS = 0,
    NIXL_ERR_NOT_POSTED = -1,
    NIXL_ERR_INVALID_PARAM = -2,
    NIXL_ERR_BACKEND = -3,
    NIXL_ERR_NOT_FOUND = -4,
    NIXL_ERR_MISMATCH = -5,
    NIXL_ERR_NOT_ALLOWED = -6,
    NIXL_ERR_REPOST_ACTIVE = -7,
    NIXL_ERR_UNKNOWN = -8,
    NIXL_ERR_NOT_SUPPORTED = -9,
    NIXL_ERR_REMOTE_DISCONNECT = -10,
    NIXL_ERR_CANCELED = -11
};
enum class nixl_cost_t { ANALYTICAL_BACKEND = 0 };

using Params = std::unordered_map<std::string, std::string>;
using Notifs = std::vector<std::pair<std::string, std::string>>;

struct nixlBasicDesc {
    uintptr_t addr;
    size_t len;
    uint64_t devId;
};
struct nixlBlobDesc : nixlBasicDesc {
    std::string metaInfo;
};
struct nixlBackendMD {
    bool isPrivate;
    virtual ~nixlBackendMD() = default;
};
struct nixlBackendReqH {
    virtual ~nixlBackendReqH() = default;
};
struct nixlMetaDesc : nixlBasicDesc {
    nixlBackendMD *metadataP;
};
struct nixlRemoteMetaDesc : nixlMetaDesc {
    std::string remoteAgent;
};
template <class T> struct nixlDescList {
    nixl_mem_t type;
    std::vector<T> descs;
    virtual ~nixlDescList() = default;
};
struct nixlBackendOptionalArgs {
    std::string notifMsg;
    bool hasNotif = false;
    std::string customParam;
};
struct nixlAgentOptionalArgs;
struct nixlBackendInitParams {
    std::string localAgent;
    std::string type;
    Params *customParams = nullptr;
    bool enableProgTh = false;
    uint64_t pthrDelay = 0;
    int syncMode = 0;
    bool enableTelemetry = false;
};

using Metas = nixlDescList<nixlMetaDesc>;
using us = std::chrono::microseconds;

class nixlBackendEngine {
    std::string backendType;
    Params customParams;
    std::vector<std::pair<uint64_t, uint64_t>> telemetryEvents;
    std::mutex telemetryEventsMutex;

  protected:
    bool initErr = false;
    const std::string localAgent;
    const bool enableTelemetry;

  public:
    explicit nixlBackendEngine(const nixlBackendInitParams *p)
        : backendType(p->type), customParams(*p->customParams), localAgent(p->localAgent), enableTelemetry(p->enableTelemetry) {}
    virtual ~nixlBackendEngine() = default;

    // What NIXL looks at without a call.
    bool getInitErr() const noexcept { return initErr; }
    const std::string &getType() const noexcept { return backendType; }
    const Params &getCustomParams() const noexcept { return customParams; }
    const std::string &getLocalAgent() const noexcept { return localAgent; }
    std::vector<std::pair<uint64_t, uint64_t>> getTelemetryEvents() {
        std::lock_guard<std::mutex> lock(telemetryEventsMutex);
        return std::move(telemetryEvents);
    }

    virtual bool supportsRemote() const = 0;
    virtual bool supportsLocal() const = 0;
    virtual bool supportsNotif() const = 0;
    virtual std::vector<nixl_mem_t> getSupportedMems() const = 0;
    virtual nixl_status_t registerMem(const nixlBlobDesc &, const nixl_mem_t &, nixlBackendMD *&) = 0;
    virtual nixl_status_t deregisterMem(nixlBackendMD *) = 0;
    virtual nixl_status_t connect(const std::string &) = 0;
    virtual nixl_status_t disconnect(const std::string &) = 0;
    virtual nixl_status_t unloadMD(nixlBackendMD *) = 0;
    virtual nixl_status_t prepXfer(const nixl_xfer_op_t &, const Metas &, const Metas &, const std::string &, nixlBackendReqH *&,
                                   const nixlBackendOptionalArgs * = nullptr) const = 0;
    virtual nixl_status_t postXfer(const nixl_xfer_op_t &, const Metas &, const Metas &, const std::string &, nixlBackendReqH *&,
                                   const nixlBackendOptionalArgs * = nullptr) const = 0;
#ifdef INSERTED
    virtual nixl_status_t pauseXfer(nixlBackendReqH *) const { return NIXL_ERR_NOT_SUPPORTED; }
#endif
    virtual nixl_status_t checkXfer(nixlBackendReqH *) const = 0;
#ifdef RETYPED
    virtual nixl_status_t releaseReqH(nixlBackendReqH *, bool) const = 0;
#else
    virtual nixl_status_t releaseReqH(nixlBackendReqH *) const = 0;
#endif
    virtual nixl_status_t prepMemView(const nixlDescList<nixlRemoteMetaDesc> &, void *&, const nixlBackendOptionalArgs * = nullptr) const {
        return NIXL_ERR_NOT_SUPPORTED;
    }
    virtual nixl_status_t prepMemView(const Metas &, void *&, const nixlBackendOptionalArgs * = nullptr) const { return NIXL_ERR_NOT_SUPPORTED; }
    virtual void releaseMemView(void *) const {}
    virtual nixl_status_t getPublicData(const nixlBackendMD *, std::string &) const { return NIXL_ERR_BACKEND; }
    virtual nixl_status_t getConnInfo(std::string &) const { return NIXL_ERR_BACKEND; }
    virtual nixl_status_t loadRemoteConnInfo(const std::string &, const std::string &) { return NIXL_ERR_BACKEND; }
    virtual nixl_status_t loadRemoteMD(const nixlBlobDesc &, const nixl_mem_t &, const std::string &, nixlBackendMD *&) { return NIXL_ERR_BACKEND; }
    virtual nixl_status_t loadLocalMD(nixlBackendMD *, nixlBackendMD *&) { return NIXL_ERR_BACKEND; }
    virtual nixl_status_t getNotifs(Notifs &) { return NIXL_ERR_BACKEND; }
    virtual nixl_status_t genNotif(const std::string &, const std::string &) const { return NIXL_ERR_BACKEND; }
    virtual nixl_status_t queryMem(const nixlDescList<nixlBlobDesc> &, std::vector<std::optional<Params>> &) const { return NIXL_ERR_NOT_SUPPORTED; }
    virtual nixl_status_t estimateXferCost(const nixl_xfer_op_t &, const Metas &, const Metas &, const std::string &, nixlBackendReqH *const &, us &,
                                           us &, nixl_cost_t &, const nixlAgentOptionalArgs * = nullptr) const {
        return NIXL_ERR_NOT_SUPPORTED;
    }
#ifdef APPENDED
    virtual void later() const {}
#endif
};

struct nixlBackendPlugin {
    int api_version;
    nixlBackendEngine *(*create_engine)(const nixlBackendInitParams *);
    void (*destroy_engine)(nixlBackendEngine *);
    const char *(*get_plugin_name)();
    const char *(*get_plugin_version)();
    Params (*get_backend_options)();
    std::vector<nixl_mem_t> (*get_backend_mems)();
};
