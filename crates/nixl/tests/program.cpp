// Drives the plug-in as NIXL does, through what it exports and nothing else: two engines in this process, and a third in another one.
//
//     program PLUGIN [altered]
#include "nixl.hpp"

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <memory>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(what)                                                                 \
    do {                                                                            \
        if (!(what)) {                                                              \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what);              \
            _exit(1);                                                               \
        }                                                                           \
    } while (0)

static nixlBackendPlugin *plugin;

// An engine, with what NIXL keeps beside it.
struct Agent {
    std::string name;
    nixlBackendEngine *engine;

    explicit Agent(std::string called, Params params = {}, std::string type = "WEFT") : name(std::move(called)) {
        nixlBackendInitParams init;
        init.localAgent = name;
        init.type = type;
        init.customParams = &params;
        engine = plugin->create_engine(&init);
        CHECK(engine && !engine->getInitErr());
        CHECK(engine->getType() == type && engine->getLocalAgent() == name && engine->getCustomParams() == params);
        CHECK(engine->getTelemetryEvents().empty());
        CHECK(engine->supportsRemote() && engine->supportsLocal() && engine->supportsNotif());
        CHECK(engine->getSupportedMems() == plugin->get_backend_mems());
        CHECK(engine->connect(name) == NIXL_SUCCESS);
    }
    ~Agent() { plugin->destroy_engine(engine); }

    std::string connection() const {
        std::string info = "something that is longer than fifteen bytes, and goes";
        CHECK(engine->getConnInfo(info) == NIXL_SUCCESS);
        return info;
    }
};

struct Memory {
    Agent &agent;
    std::vector<unsigned char> bytes;
    nixlBackendMD *own = nullptr, *self = nullptr;

    Memory(Agent &of, size_t len) : agent(of), bytes(len) {
        nixlBlobDesc desc;
        desc.addr = address();
        desc.len = len;
        desc.devId = 0;
        CHECK(agent.engine->registerMem(desc, DRAM_SEG, own) == NIXL_SUCCESS && own);
        CHECK(agent.engine->loadLocalMD(own, self) == NIXL_SUCCESS && self && self != own);
    }
    uintptr_t address() const { return reinterpret_cast<uintptr_t>(bytes.data()); }
    nixlBlobDesc described() const {
        nixlBlobDesc desc;
        desc.addr = address();
        desc.len = bytes.size();
        desc.devId = 0;
        CHECK(agent.engine->getPublicData(own, desc.metaInfo) == NIXL_SUCCESS);
        return desc;
    }
    void deregister() {
        CHECK(agent.engine->unloadMD(self) == NIXL_SUCCESS);
        CHECK(agent.engine->deregisterMem(own) == NIXL_SUCCESS);
    }
};

static Metas list(std::vector<nixlMetaDesc> descs) {
    Metas metas;
    metas.type = DRAM_SEG;
    metas.descs = std::move(descs);
    return metas;
}
static nixlMetaDesc span(uintptr_t address, size_t len, nixlBackendMD *md) {
    nixlMetaDesc desc;
    desc.addr = address;
    desc.len = len;
    desc.devId = 0;
    desc.metadataP = md;
    return desc;
}

static nixl_status_t finish(nixlBackendEngine *engine, nixlBackendReqH *handle, nixl_status_t status) {
    while (status == NIXL_IN_PROG) status = engine->checkXfer(handle);
    return status;
}

static Notifs wait_for(nixlBackendEngine *engine, size_t count) {
    Notifs all;
    for (int tries = 0; tries < 20000 && all.size() < count; tries++) {
        CHECK(engine->getNotifs(all) == NIXL_SUCCESS);
        usleep(500);
    }
    CHECK(all.size() == count);
    return all;
}

static void two_engines() {
    Agent a("prefill-with-a-name-that-is-no-short-string"), b("decode", {{"deadline", "20s"}, {"checksum", "true"}, {"transports", ""}});
    Memory mine(a, 1 << 20), theirs(b, 1 << 20);
    for (size_t i = 0; i < theirs.bytes.size(); i++) theirs.bytes[i] = i * 7 + i / 4096;
    CHECK(a.engine->loadRemoteConnInfo(b.name, b.connection()) == NIXL_SUCCESS);
    CHECK(a.engine->loadRemoteConnInfo(b.name, b.connection()) == NIXL_SUCCESS);
    nixlBackendMD *remote = nullptr;
    CHECK(a.engine->loadRemoteMD(theirs.described(), DRAM_SEG, b.name, remote) == NIXL_SUCCESS && remote);

    // Blocks in another order, more than once by one handle.
    const size_t block = 4096, blocks = 100;
    std::vector<nixlMetaDesc> here, there;
    for (size_t i = 0; i < blocks; i++) {
        here.push_back(span(mine.address() + i * block, block, mine.own));
        there.push_back(span(theirs.address() + (i * 37 % 256) * block, block, remote));
    }
    Metas local = list(here), far = list(there);
    nixlBackendReqH *handle = nullptr;
    nixlBackendOptionalArgs options;
    CHECK(a.engine->prepXfer(NIXL_READ, local, far, b.name, handle, &options) == NIXL_SUCCESS && handle);
    CHECK(a.engine->checkXfer(handle) == NIXL_ERR_NOT_POSTED);
    for (int round = 0; round < 3; round++) {
        std::fill(mine.bytes.begin(), mine.bytes.end(), 0);
        theirs.bytes[0] = round;
        // A notification that was not said when it was prepared.
        options.hasNotif = round > 0;
        options.notifMsg = round == 1 ? "short" : std::string(1000, 'x') + '\0' + "y";
        CHECK(finish(a.engine, handle, a.engine->postXfer(NIXL_READ, local, far, b.name, handle, &options)) == NIXL_SUCCESS);
        for (size_t i = 0; i < blocks; i++)
            CHECK(!memcmp(&mine.bytes[i * block], &theirs.bytes[(i * 37 % 256) * block], block));
    }
    Notifs told = wait_for(b.engine, 2);
    CHECK(told[0] == std::make_pair(a.name, std::string("short")));
    CHECK(told[1] == std::make_pair(a.name, std::string(1000, 'x') + '\0' + "y"));
    CHECK(a.engine->releaseReqH(handle) == NIXL_SUCCESS);

    // A write, and many notifications that C++ then has in a vector of its own.
    mine.bytes[5] = 99;
    local = list({span(mine.address() + 5, 1, mine.own)}), far = list({span(theirs.address() + 77, 1, remote)});
    CHECK(a.engine->prepXfer(NIXL_WRITE, local, far, b.name, handle, nullptr) == NIXL_SUCCESS);
    CHECK(finish(a.engine, handle, a.engine->postXfer(NIXL_WRITE, local, far, b.name, handle, nullptr)) == NIXL_SUCCESS);
    CHECK(theirs.bytes[77] == 99);
    CHECK(a.engine->releaseReqH(handle) == NIXL_SUCCESS);
    for (int i = 0; i < 300; i++) CHECK(a.engine->genNotif(b.name, "number " + std::string(i % 40, '.') + std::to_string(i)) == NIXL_SUCCESS);
    told = wait_for(b.engine, 300);
    for (int i = 0; i < 300; i++) CHECK(told[i].second == "number " + std::string(i % 40, '.') + std::to_string(i) && told[i].first == a.name);
    Notifs begun = {{"kept", "so"}};
    CHECK(a.engine->genNotif(a.name, "to itself") == NIXL_SUCCESS);
    CHECK(a.engine->getNotifs(begun) == NIXL_SUCCESS && begun.size() == 2 && begun[0].first == "kept" && begun[1] == std::make_pair(a.name, std::string("to itself")));

    // Within one agent.
    options.hasNotif = true;
    options.notifMsg = "moved";
    local = list({span(mine.address(), 100, mine.own)}), far = list({span(mine.address() + 50, 100, mine.self)});
    std::vector<unsigned char> before(mine.bytes.begin(), mine.bytes.begin() + 100);
    CHECK(a.engine->prepXfer(NIXL_WRITE, local, far, a.name, handle, &options) == NIXL_SUCCESS);
    CHECK(a.engine->postXfer(NIXL_WRITE, local, far, a.name, handle, &options) == NIXL_SUCCESS);
    CHECK(!memcmp(before.data(), &mine.bytes[50], 100));
    CHECK(wait_for(a.engine, 1)[0].second == "moved");
    CHECK(a.engine->releaseReqH(handle) == NIXL_SUCCESS);

    // What cannot be right is refused, and changes nothing.
    handle = nullptr;
    auto refused = [&](std::vector<nixlMetaDesc> l, std::vector<nixlMetaDesc> r, const std::string &agent) {
        nixlBackendReqH *none = nullptr;
        nixl_status_t status = a.engine->prepXfer(NIXL_WRITE, list(l), list(r), agent, none, nullptr);
        CHECK(status < 0 && !none);
        return status;
    };
    const auto good = span(mine.address(), 64, mine.own), well = span(theirs.address(), 64, remote);
    CHECK(refused({good}, {}, b.name) == NIXL_ERR_INVALID_PARAM);
    CHECK(refused({}, {}, b.name) == NIXL_ERR_INVALID_PARAM);
    CHECK(refused({good}, {span(theirs.address(), 65, remote)}, b.name) == NIXL_ERR_INVALID_PARAM);
    CHECK(refused({good}, {span(theirs.address() - 1, 64, remote)}, b.name) == NIXL_ERR_INVALID_PARAM);
    CHECK(refused({good}, {span(theirs.address() + theirs.bytes.size() - 63, 64, remote)}, b.name) == NIXL_ERR_INVALID_PARAM);
    CHECK(refused({span(mine.address(), SIZE_MAX, mine.own)}, {span(theirs.address(), SIZE_MAX, remote)}, b.name) == NIXL_ERR_INVALID_PARAM);
    CHECK(refused({good}, {span(UINTPTR_MAX, 64, remote)}, b.name) == NIXL_ERR_INVALID_PARAM);
    CHECK(refused({good}, {span(theirs.address(), 64, nullptr)}, b.name) == NIXL_ERR_INVALID_PARAM);
    CHECK(refused({good}, {good}, b.name) == NIXL_ERR_INVALID_PARAM);
    CHECK(refused({well}, {well}, b.name) == NIXL_ERR_INVALID_PARAM);
    CHECK(refused({good}, {well}, "nobody") == NIXL_ERR_NOT_FOUND);
    nixlBackendMD foreign;
    CHECK(refused({good}, {span(theirs.address(), 64, &foreign)}, b.name) == NIXL_ERR_INVALID_PARAM);
    CHECK(a.engine->genNotif("nobody", "x") == NIXL_ERR_NOT_FOUND);
    CHECK(a.engine->genNotif(b.name, std::string(1 << 20, 'x')) == NIXL_ERR_INVALID_PARAM);
    CHECK(a.engine->loadRemoteConnInfo("c", b.connection()) == NIXL_ERR_INVALID_PARAM);
    CHECK(a.engine->loadRemoteConnInfo("c", "") == NIXL_ERR_MISMATCH);
    nixlBackendMD *none = nullptr;
    nixlBlobDesc bad = theirs.described();
    bad.metaInfo[3] ^= 1;
    CHECK(a.engine->loadRemoteMD(bad, DRAM_SEG, b.name, none) == NIXL_ERR_MISMATCH && !none);
    bad = theirs.described();
    bad.len++;
    CHECK(a.engine->loadRemoteMD(bad, DRAM_SEG, b.name, none) == NIXL_ERR_INVALID_PARAM && !none);
    CHECK(a.engine->loadRemoteMD(theirs.described(), FILE_SEG, b.name, none) == NIXL_ERR_NOT_SUPPORTED && !none);
    bad.addr = 0;
    CHECK(a.engine->registerMem(bad, DRAM_SEG, none) == NIXL_ERR_INVALID_PARAM && !none);
    CHECK(a.engine->registerMem(theirs.described(), OBJ_SEG, none) == NIXL_ERR_NOT_SUPPORTED && !none);
    std::vector<std::optional<Params>> answers;
    CHECK(a.engine->queryMem({}, answers) == NIXL_ERR_NOT_SUPPORTED);
    us duration, margin;
    nixl_cost_t method;
    CHECK(a.engine->estimateXferCost(NIXL_READ, local, far, b.name, handle, duration, margin, method) == NIXL_ERR_NOT_SUPPORTED);
    void *view = nullptr;
    CHECK(a.engine->prepMemView(local, view) == NIXL_ERR_NOT_SUPPORTED && a.engine->prepMemView(nixlDescList<nixlRemoteMetaDesc>{}, view) == NIXL_ERR_NOT_SUPPORTED);
    a.engine->releaseMemView(view);

    // A registration that is given back: who knows it still is refused, also where the same bytes are registered anew.
    local = list({good}), far = list({well});
    CHECK(a.engine->prepXfer(NIXL_WRITE, local, far, b.name, handle, nullptr) == NIXL_SUCCESS);
    const unsigned char kept = theirs.bytes[0];
    mine.bytes[0] = kept + 1;
    theirs.deregister();
    {
        Memory again(b, 64);
        CHECK(finish(a.engine, handle, a.engine->postXfer(NIXL_WRITE, local, far, b.name, handle, nullptr)) == NIXL_ERR_NOT_ALLOWED);
        CHECK(theirs.bytes[0] == kept);
        again.deregister();
    }
    CHECK(a.engine->releaseReqH(handle) == NIXL_SUCCESS);
    CHECK(a.engine->unloadMD(remote) == NIXL_SUCCESS);
    CHECK(a.engine->disconnect(b.name) == NIXL_SUCCESS && a.engine->disconnect(b.name) == NIXL_ERR_NOT_FOUND);
    mine.deregister();
}

// Parameters are settings; what is none is refused, and under somebody else's name passed over.
static void parameters() {
    auto made = [](Params params, const char *type) {
        nixlBackendInitParams init;
        init.localAgent = "a";
        init.type = type;
        init.customParams = &params;
        nixlBackendEngine *engine = plugin->create_engine(&init);
        if (engine) delete engine; // as well as by the plug-in's own function
        return engine != nullptr;
    };
    CHECK(made({{"deadline", "1s"}}, "WEFT") && made(plugin->get_backend_options(), "WEFT"));
    CHECK(!made({{"deadline", "soon"}}, "WEFT") && !made({{"num_threads", "2"}}, "WEFT") && made({{"num_threads", "2"}}, "UCX"));
    CHECK(!made({{"checksum", "maybe"}}, "UCX"));
    Params options = plugin->get_backend_options();
    CHECK(options.count("deadline") == 1 && options.at("checksum").empty() && options.find("nothing") == options.end());
    const size_t offered = options.size();
    for (int i = 0; i < 100; i++) options["key " + std::to_string(i)] = std::string(i, 'v');
    CHECK(options.size() == offered + 100 && options.at("key 99").size() == 99 && options.at("deadline").empty());
    Params copy = options, moved = std::move(options);
    CHECK(copy == moved);
}

// A peer that is killed is an error at once, and the memory is the caller's again.
static void killed(const char *self, const char *path) {
    int to[2], from[2];
    CHECK(!pipe(to) && !pipe(from));
    pid_t child = fork();
    CHECK(child >= 0);
    if (!child) {
        dup2(to[0], 0);
        dup2(from[1], 1);
        execl(self, self, path, "peer", nullptr);
        _exit(1);
    }
    auto take = [&](int fd) {
        uint64_t len;
        CHECK(read(fd, &len, 8) == 8);
        std::string text(len, 0);
        for (size_t got = 0; got < len;) {
            ssize_t some = read(fd, &text[got], len - got);
            CHECK(some > 0);
            got += some;
        }
        return text;
    };
    Agent a("survivor", {{"deadline", "20s"}});
    Memory mine(a, 1 << 16);
    std::string connection = take(from[0]), blob = take(from[0]), address = take(from[0]);
    CHECK(a.engine->loadRemoteConnInfo("peer", connection) == NIXL_SUCCESS);
    nixlBlobDesc desc;
    memcpy(&desc.addr, address.data(), 8);
    desc.len = 1 << 16;
    desc.devId = 0;
    desc.metaInfo = blob;
    nixlBackendMD *remote = nullptr;
    CHECK(a.engine->loadRemoteMD(desc, DRAM_SEG, "peer", remote) == NIXL_SUCCESS);
    Metas local = list({span(mine.address(), 1 << 16, mine.own)}), far = list({span(desc.addr, 1 << 16, remote)});
    nixlBackendReqH *handle = nullptr;
    CHECK(a.engine->prepXfer(NIXL_READ, local, far, "peer", handle, nullptr) == NIXL_SUCCESS);
    CHECK(finish(a.engine, handle, a.engine->postXfer(NIXL_READ, local, far, "peer", handle, nullptr)) == NIXL_SUCCESS);
    CHECK(mine.bytes[12345] == 42);
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    const auto begin = std::chrono::steady_clock::now();
    nixl_status_t status;
    do status = finish(a.engine, handle, a.engine->postXfer(NIXL_READ, local, far, "peer", handle, nullptr));
    while (status == NIXL_SUCCESS && std::chrono::steady_clock::now() - begin < std::chrono::seconds(30));
    CHECK(status == NIXL_ERR_REMOTE_DISCONNECT || status == NIXL_ERR_NOT_ALLOWED);
    CHECK(a.engine->releaseReqH(handle) == NIXL_SUCCESS);
    CHECK(a.engine->prepXfer(NIXL_READ, local, far, "peer", handle, nullptr) == NIXL_ERR_REMOTE_DISCONNECT);
    CHECK(a.engine->unloadMD(remote) == NIXL_SUCCESS);
    mine.deregister();
}

static void peer() {
    Agent a("peer");
    Memory memory(a, 1 << 16);
    std::fill(memory.bytes.begin(), memory.bytes.end(), 42);
    const uintptr_t address = memory.address();
    auto give = [](const std::string &text) {
        const uint64_t len = text.size();
        CHECK(write(1, &len, 8) == 8 && write(1, text.data(), len) == ssize_t(len));
    };
    give(a.connection());
    give(memory.described().metaInfo);
    give(std::string(reinterpret_cast<const char *>(&address), 8));
    for (;;) pause();
}

int main(int, char **arguments) {
    void *library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    auto init = reinterpret_cast<nixlBackendPlugin *(*)()>(dlsym(library, "nixl_plugin_init"));
    CHECK(init && dlsym(library, "nixl_plugin_fini"));
    plugin = init();
    CHECK(plugin && plugin->api_version == 1 && !strcmp(plugin->get_plugin_name(), "WEFT") && strlen(plugin->get_plugin_version()) > 0);
    CHECK(!plugin->get_backend_mems().empty() && plugin->get_backend_mems()[0] == DRAM_SEG);
    if (arguments[2]) peer();
    two_engines();
    parameters();
    killed(arguments[0], arguments[1]);
    printf("done\n");
}
