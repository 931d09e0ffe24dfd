// weft.hpp: weft.h for C++17. Handles that give themselves back, and exceptions in place of statuses; nothing to link beyond libweft.
//
//     weft::Agent agent("decode");
//     weft::Peer peer = agent.connect(address, 1s);
//     weft::Region theirs = peer.region("kv", 1s);
//     weft::Memory mine = agent.allocate(theirs.length());
//     peer.read({weft::leg(mine, theirs)}, weft::Options().deadline(1s).checksum(true)).wait();
//
// Every class holds one handle of weft.h, which `get` gives, for what is not wrapped here. What is said there of threads, forks and
// lifetimes holds. Destructors wait for nobody: memory that was registered, and not allocated by Weft, is deregistered by name.
#ifndef WEFT_HPP
#define WEFT_HPP

#include <chrono>
#include <initializer_list>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <weft.h>

namespace weft {

using Nanoseconds = std::chrono::nanoseconds;

inline uint64_t count(Nanoseconds time) { return time.count() < 0 ? 0 : static_cast<uint64_t>(time.count()); }

// A negative status, with its text.
class Error : public std::runtime_error {
public:
    explicit Error(weft_status status) : std::runtime_error(weft_last_error()), status_(status) {}
    weft_status status() const noexcept { return status_; }
    const char *name() const noexcept { return weft_status_name(status_); }

private:
    weft_status status_;
};

// Passes WEFT_OK, WEFT_PENDING and WEFT_NONE on.
inline weft_status check(weft_status status) {
    if (status < 0) throw Error(status);
    return status;
}

// The one owner of a handle.
template <class T, void (*Free)(T *)> class Handle {
public:
    Handle() = default;
    T *get() const noexcept { return handle_.get(); }
    explicit operator bool() const noexcept { return handle_ != nullptr; }

    // Where functions of weft.h put a handle.
    class Place {
    public:
        explicit Place(Handle &owner) : owner_(owner) {}
        ~Place() { owner_.handle_.reset(made_); }
        Place(const Place &) = delete;
        Place &operator=(const Place &) = delete;
        operator T **() { return &made_; }

    private:
        Handle &owner_;
        T *made_ = nullptr;
    };
    Place place() { return Place(*this); }
    T *release() noexcept { return handle_.release(); }

private:
    struct Deleter {
        void operator()(T *handle) const noexcept { Free(handle); }
    };
    std::unique_ptr<T, Deleter> handle_;
};

class Memory : public Handle<weft_memory, weft_memory_free> {
public:
    void *address() const { return weft_memory_address(get()); }
    uint64_t length() const { return weft_memory_length(get()); }
    template <class T> T *as() const { return static_cast<T *>(address()); }
    // Afterwards nobody touches the bytes any more. Where it throws, the memory is as it was.
    void deregister(Nanoseconds timeout) {
        check(weft_memory_deregister(get(), count(timeout)));
        release();
    }
};

class Region : public Handle<weft_region, weft_region_free> {
public:
    uint64_t length() const { return weft_region_length(get()); }
};

// Spans here and there; all of both where there are none. The lists must stay until the transfer is posted.
inline weft_leg leg(const Memory &local, const Region &remote) {
    return weft_leg{sizeof(weft_leg), local.get(), remote.get(), nullptr, 0, nullptr, 0};
}
inline weft_leg leg(const Memory &local, const std::vector<weft_span> &here, const Region &remote,
                    const std::vector<weft_span> &there) {
    return weft_leg{sizeof(weft_leg), local.get(), remote.get(), here.data(), here.size(), there.data(), there.size()};
}

class Options {
public:
    Options &deadline(Nanoseconds after) { return raw_.deadline_ns = count(after), *this; }
    Options &checksum(bool on) { return raw_.checksum = on ? WEFT_ON : WEFT_OFF, *this; }
    Options &notify(std::string payload) { return notification_ = std::move(payload), *this; }
    weft_transfer_options raw() const {
        weft_transfer_options raw = raw_;
        raw.notification = notification_ ? notification_->data() : nullptr;
        raw.notification_length = notification_ ? notification_->size() : 0;
        return raw;
    }

private:
    weft_transfer_options raw_{sizeof(weft_transfer_options), 0, nullptr, 0, WEFT_AS_SET};
    std::optional<std::string> notification_;
};

class Transfer : public Handle<weft_transfer, weft_transfer_free> {
public:
    // Nothing while it is under way.
    std::optional<weft_summary> poll() { return end(&weft_transfer_poll); }
    weft_summary wait() { return *wait_for(WEFT_FOREVER); }
    std::optional<weft_summary> wait(Nanoseconds timeout) { return wait_for(count(timeout)); }
    void cancel() { check(weft_transfer_cancel(get())); }

private:
    template <class Ask> std::optional<weft_summary> end(Ask ask) {
        weft_summary summary{};
        summary.size = sizeof summary;
        if (check(ask(get(), &summary)) == WEFT_PENDING) return std::nullopt;
        return summary;
    }
    std::optional<weft_summary> wait_for(uint64_t timeout) {
        return end([timeout](weft_transfer *it, weft_summary *summary) { return weft_transfer_wait(it, timeout, summary); });
    }
};

using Legs = std::initializer_list<weft_leg>;

class Peer : public Handle<weft_peer, weft_peer_free> {
public:
    std::string name() const { return weft_peer_name(get()); }
    bool connected() const { return weft_peer_is_connected(get()) != 0; }
    Region region(const std::string &name, Nanoseconds timeout) {
        Region region;
        check(weft_peer_region(get(), name.c_str(), count(timeout), region.place()));
        return region;
    }
    Transfer read(Legs legs, const Options &options = {}) { return post(&weft_read, legs, options); }
    Transfer write(Legs legs, const Options &options = {}) { return post(&weft_write, legs, options); }
    void notify(const std::string &payload) { check(weft_peer_notify(get(), payload.data(), payload.size())); }
    uint64_t fetch_add(const Region &region, uint64_t offset, uint64_t value, Nanoseconds deadline = {}) {
        uint64_t before = 0;
        check(weft_fetch_add(get(), region.get(), offset, value, count(deadline), &before));
        return before;
    }
    uint64_t compare_swap(const Region &region, uint64_t offset, uint64_t expected, uint64_t desired, Nanoseconds deadline = {}) {
        uint64_t before = 0;
        check(weft_compare_swap(get(), region.get(), offset, expected, desired, count(deadline), &before));
        return before;
    }

private:
    template <class Post> Transfer post(Post post, Legs legs, const Options &options) {
        weft_transfer_options raw = options.raw();
        Transfer transfer;
        check(post(get(), legs.begin(), legs.size(), &raw, transfer.place()));
        return transfer;
    }
};

class Notification : public Handle<weft_notification, weft_notification_free> {
public:
    std::string payload() const {
        const void *bytes = nullptr;
        size_t length = 0;
        check(weft_notification_payload(get(), &bytes, &length));
        return std::string(static_cast<const char *>(bytes), length);
    }
    Peer peer() const {
        Peer peer;
        check(weft_notification_peer(get(), peer.place()));
        return peer;
    }
};

class Agent : public Handle<weft_agent, weft_agent_free> {
public:
    explicit Agent(const std::string &name, const std::vector<std::string> &settings = {}) {
        std::vector<const char *> texts;
        for (const std::string &setting : settings) texts.push_back(setting.c_str());
        check(weft_agent_start(WEFT_ABI_VERSION, name.c_str(), texts.data(), texts.size(), place()));
    }
    std::string address() const { return weft_agent_address(get()); }
    std::string metadata() const {
        const void *bytes = nullptr;
        size_t length = 0;
        check(weft_agent_metadata(get(), &bytes, &length));
        return std::string(static_cast<const char *>(bytes), length);
    }
    int event_fd() {
        int fd = -1;
        check(weft_agent_event_fd(get(), &fd));
        return fd;
    }
    Memory allocate(size_t length, const weft_memory_options *options = nullptr) {
        Memory memory;
        check(weft_memory_allocate(get(), length, options, memory.place()));
        return memory;
    }
    Memory register_memory(void *address, size_t length, const weft_memory_options *options = nullptr) {
        Memory memory;
        check(weft_memory_register(get(), address, length, options, memory.place()));
        return memory;
    }
    void publish(const std::string &name, const Memory &memory, weft_access access) {
        check(weft_publish(get(), name.c_str(), memory.get(), access));
    }
    void withdraw(const std::string &name) { check(weft_withdraw(get(), name.c_str())); }
    Peer connect(const std::string &address, Nanoseconds timeout) {
        Peer peer;
        check(weft_connect(get(), address.c_str(), count(timeout), peer.place()));
        return peer;
    }
    Peer connect_metadata(const std::string &metadata, Nanoseconds timeout) {
        Peer peer;
        check(weft_connect_metadata(get(), metadata.data(), metadata.size(), count(timeout), peer.place()));
        return peer;
    }
    // Nothing where none comes in time.
    std::optional<Notification> notification(Nanoseconds timeout) {
        Notification told;
        if (check(weft_agent_notification(get(), count(timeout), told.place())) == WEFT_NONE) return std::nullopt;
        return told;
    }
    void close() { check(weft_agent_close(get())); }
};

} // namespace weft

#endif
