/*
 * weft.h: Weft's C API. Moves memory between processes and machines.
 *
 *     #include <stdio.h>
 *     #include <weft.h>
 *
 *     // Reads the region "kv" of the agent at `address` into memory of this process, by one second from now.
 *     int pull(const char *address) {
 *         const uint64_t second = 1000000000;
 *         weft_agent *agent = NULL;
 *         weft_peer *peer = NULL;
 *         weft_region *theirs = NULL;
 *         weft_memory *mine = NULL;
 *         weft_transfer *transfer = NULL;
 *         weft_status status = weft_agent_start(WEFT_ABI_VERSION, "decode", NULL, 0, &agent);
 *         if (status == WEFT_OK) status = weft_connect(agent, address, second, &peer);
 *         if (status == WEFT_OK) status = weft_peer_region(peer, "kv", second, &theirs);
 *         if (status == WEFT_OK) status = weft_memory_allocate(agent, weft_region_length(theirs), NULL, &mine);
 *         if (status == WEFT_OK) {
 *             weft_leg all = {sizeof all, mine, theirs, NULL, 0, NULL, 0};
 *             weft_transfer_options options = {.size = sizeof options, .deadline_ns = second, .checksum = WEFT_ON};
 *             status = weft_read(peer, &all, 1, &options, &transfer);
 *         }
 *         if (status == WEFT_OK) status = weft_transfer_wait(transfer, WEFT_FOREVER, NULL);
 *         if (status != WEFT_OK) fprintf(stderr, "%s: %s\n", weft_status_name(status), weft_last_error());
 *         weft_transfer_free(transfer);
 *         weft_memory_free(mine);
 *         weft_region_free(theirs);
 *         weft_peer_free(peer);
 *         weft_agent_free(agent);
 *         return status == WEFT_OK ? 0 : 1;
 *     }
 *
 * What holds for all of it:
 *
 * - **Outcomes.** Functions that can fail return a weft_status: WEFT_OK, a positive one that is no failure (WEFT_PENDING, WEFT_NONE), or a
 *   negative one. After a negative one weft_last_error() has the text, for the calling thread.
 * - **Handles** are opaque pointers. Each belongs to the caller and is given back by its free function; NULL may always be given back. In
 *   what order is all the same: what a handle needs stays there. A handle that has been given back must not be used again.
 * - **Arguments** that are NULL, misaligned, too small or contradictory are WEFT_ERROR_INVALID_ARGUMENT, and change nothing. A handle that
 *   could not be made is NULL. Text is UTF-8 and ends with a zero.
 * - **Structures** that may grow begin with their own size. Zero means "as usual" in every other field, so `= {.size = sizeof options}` is a
 *   good beginning. A program goes on working with a later library, and with an earlier one as long as it leaves new fields zero.
 * - **Times** are nanoseconds, and a month is the longest. A timeout of 0 looks and does not wait.
 * - **Threads.** "Threads: any" means that every thread may call it at any moment, with handles that others are using too. "Threads: last"
 *   means that it ends a handle, which nobody may use at the same time or later.
 * - **Forks.** A handle belongs to the process that made it. In a forked child every call with it that returns a status is
 *   WEFT_ERROR_FORKED, and giving it back leaves the parent's alone.
 * - **Panics** do not come out of the library. A call in which something went wrong inside of Weft is WEFT_ERROR_PANIC, and so is every
 *   later one with the same handle.
 */
#ifndef WEFT_H
#define WEFT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Version ------------------------------------------------------------------------------------------------------------------------ */

/* What this header describes: the upper half says what is compatible, the lower half counts what has been added since. */
#define WEFT_ABI_VERSION 0x00010000u

/* As long as it takes: for timeouts. A transfer ends by its deadline all the same. */
#define WEFT_FOREVER UINT64_MAX

/* The version that the library has. Threads: any. */
uint32_t weft_abi_version(void);

/* The release of the library, as text: "0.1.0". Threads: any. */
const char *weft_version(void);

/* ---- What can go wrong -------------------------------------------------------------------------------------------------------------- */

/* Grouped by what the caller does next. Later versions may have more of them: treat an unknown negative one as a failure. */
typedef enum weft_status {
    WEFT_OK = 0,
    WEFT_PENDING = 1,                 /* it is still under way */
    WEFT_NONE = 2,                    /* there is none now */

    /* Fix the call. */
    WEFT_ERROR_INVALID_ARGUMENT = -1, /* the call makes no sense as it is */
    WEFT_ERROR_VERSION = -2,          /* the program was compiled for a library that this one is not */
    WEFT_ERROR_SETTINGS = -3,         /* a setting is unknown, malformed, or contradicts another */
    WEFT_ERROR_NAME = -4,             /* nothing is published under the name, or something is already */
    WEFT_ERROR_REFUSED = -5,          /* the owner of the memory does not allow it: released, stale, out of bounds, not permitted */
    WEFT_ERROR_GPU = -6,              /* there is no such device, or the memory is not a device's */
    WEFT_ERROR_FORKED = -7,           /* made before a fork, by the parent of this process */

    /* Try again. */
    WEFT_ERROR_FULL = -20,            /* too much is under way: later */
    WEFT_ERROR_TIMED_OUT = -21,       /* what was waited for did not come in time */
    WEFT_ERROR_EXPIRED = -22,         /* the deadline of a transfer or an operation passed */
    WEFT_ERROR_CANCELLED = -23,       /* the caller wanted it to end */
    WEFT_ERROR_STILL_IN_USE = -24,    /* a peer is inside the memory: it must stay as it is for now */
    WEFT_ERROR_CHECKSUM = -25,        /* the bytes at the two ends differ */

    /* See to the peer. */
    WEFT_ERROR_CONNECT = -40,         /* no session came about: address, secret, versions */
    WEFT_ERROR_PEER_LOST = -41,       /* the session is over: connect again */
    WEFT_ERROR_UNKNOWN_OUTCOME = -42, /* an atomic operation was sent, and whether it happened is not known */
    WEFT_ERROR_RENDEZVOUS = -43,      /* names cannot be looked up, or the launcher's variables are missing */

    /* See to the group. */
    WEFT_ERROR_COLLECTIVE = -60,      /* a rank is lost, late, or called something else: weft_communicator_shrink */
    WEFT_ERROR_NO_QUORUM = -61,       /* what is left of the group goes on without this rank, or not at all */

    /* Give up. */
    WEFT_ERROR_SYSTEM = -80,          /* the operating system refused something: os_error */
    WEFT_ERROR_STOPPED = -81,         /* the agent has been closed */
    WEFT_ERROR_PANIC = -82            /* a fault of Weft's; the handle is of no further use */
} weft_status;

/* Bytes `begin` to `end` of a leg's spans, counted through them from the first on. */
typedef struct weft_range {
    uint64_t leg;
    uint64_t begin;
    uint64_t end;
} weft_range;

/* All that is known of a failure. Texts are NULL where there is nothing to say. */
typedef struct weft_error {
    size_t size;
    weft_status status;
    int32_t os_error;          /* errno, where the operating system is the reason, else 0 */
    const char *text;
    const char *peer;          /* with whom */
    const char *transport;     /* over what */
    uint64_t bytes_done;       /* of a transfer: how far it came */
    uint64_t bytes_total;
    const weft_range *done;    /* of a transfer: what has been moved. All else may hold anything */
    size_t done_count;
    int32_t may_have_happened; /* of an atomic operation: 0 if it certainly did not happen, and will not */
    int32_t rank;              /* of a collective: the rank that is to blame, else -1 */
} weft_error;

/* The name of a status as it stands above, as text. Threads: any. */
const char *weft_status_name(weft_status status);

/* What went wrong in the last call of this thread that failed; empty before the first. It is there until the next one fails. Threads: any,
 * each has its own. */
const char *weft_last_error(void);

/* The same with all that is known; WEFT_NONE before the first. What it points to is there until the next call of this thread fails.
 * Threads: any, each has its own. */
weft_status weft_last_error_details(weft_error *details);

/* ---- Agents ------------------------------------------------------------------------------------------------------------------------- */

/* Registers memory, publishes it, connects to other agents and moves bytes. One a process is usual, several are fine. */
typedef struct weft_agent weft_agent;

/* Starts an agent. `abi_version` is WEFT_ABI_VERSION. A `name` of NULL leaves it to the settings. `settings` are `setting_count` texts of the
 * form "key=value" as in docs/settings.md; they come before the environment and the settings file. Threads: any. */
weft_status weft_agent_start(uint32_t abi_version, const char *name, const char *const *settings, size_t setting_count,
                             weft_agent **agent);

/* The name that peers see. It is there as long as the handle. Threads: any. */
const char *weft_agent_name(const weft_agent *agent);

/* Where peers reach it, for weft_connect. It is there as long as the handle. Threads: any. */
const char *weft_agent_address(const weft_agent *agent);

/* All that a peer needs to connect to this life of the agent and to no other, as bytes to be carried by other means: weft_connect_metadata.
 * They contain no secret, and are there as long as the handle. Threads: any. */
weft_status weft_agent_metadata(const weft_agent *agent, const void **bytes, size_t *length);

/* A descriptor to sleep on, by poll or epoll: it becomes readable when something may have happened. That is the end of a transfer that was
 * posted, or of a collective that was started, after this was first asked for; and a notification after weft_agent_notification has said
 * WEFT_NONE. Read eight bytes from it first, then look at everything that you wait for, notifications until there is none. It may be
 * readable for nothing. It belongs to the agent: do not close it. Threads: any. */
weft_status weft_agent_event_fd(weft_agent *agent, int *fd);

/* Stops the agent: its peers are told, what is published is withdrawn, and what is under way or asked of it later ends as
 * WEFT_ERROR_STOPPED. Threads: any. */
weft_status weft_agent_close(weft_agent *agent);

/* Gives the handle back. The agent is closed, unless a communicator was made with it, and then with that. Threads: last. */
void weft_agent_free(weft_agent *agent);

/* ---- Memory ------------------------------------------------------------------------------------------------------------------------- */

/* Memory that an agent has registered. */
typedef struct weft_memory weft_memory;

/* Where memory is. */
typedef enum weft_place {
    WEFT_PLACE_DRAM = 0,
    WEFT_PLACE_GPU = 1 /* a CUDA device's */
} weft_place;

/* What peers may do with memory that is published. */
typedef enum weft_access { WEFT_ACCESS_READ = 1, WEFT_ACCESS_WRITE = 2, WEFT_ACCESS_READ_WRITE = 3 } weft_access;

typedef struct weft_memory_options {
    size_t size;
    weft_place place;
    uint32_t device;    /* of a GPU: its number */
    uint32_t numa_node; /* of DRAM to allocate: one more than the preferred node; 0 for none */
} weft_memory_options;

/* Registers `length` bytes that the caller has: by malloc, mmap, cudaMalloc. They must stay where they are until weft_memory_deregister has
 * returned WEFT_OK. Registering them twice makes two registrations. `options` may be NULL. Threads: any. */
weft_status weft_memory_register(weft_agent *agent, void *address, size_t length, const weft_memory_options *options,
                                 weft_memory **memory);

/* Memory that Weft allocates, zeroed where it is DRAM. Peers on this host map it, which is faster than what they must do with other memory.
 * It is there as long as the handle, what is published, and transfers that use it. `options` may be NULL. Threads: any. */
weft_status weft_memory_allocate(weft_agent *agent, size_t length, const weft_memory_options *options, weft_memory **memory);

/* The first byte; of a GPU's memory its address there. Peers and transfers may change the bytes at any moment. In a forked child, too.
 * Threads: any. */
void *weft_memory_address(const weft_memory *memory);
uint64_t weft_memory_length(const weft_memory *memory);

/* Withdraws and releases the memory, and gives the handle back. After WEFT_OK nobody touches the bytes any more. Peers are refused from the
 * beginning of this call; one that is frozen in the middle of a copy holds the memory, and after `timeout_ns` of that this is
 * WEFT_ERROR_STILL_IN_USE: the handle stays, to try again. Threads: last. */
weft_status weft_memory_deregister(weft_memory *memory, uint64_t timeout_ns);

/* Gives the handle back and waits for nobody: for memory that Weft allocated. Bytes that the caller registered may be touched until the
 * agent is closed: deregister those instead. Threads: last. */
void weft_memory_free(weft_memory *memory);

/* Lets peers reach memory under a name, until it is withdrawn or deregistered or the agent is closed. Threads: any. */
weft_status weft_publish(weft_agent *agent, const char *name, weft_memory *memory, weft_access access);

/* Takes the name back. Whoever has looked it up is refused from now on. Threads: any. */
weft_status weft_withdraw(weft_agent *agent, const char *name);

/* ---- Peers -------------------------------------------------------------------------------------------------------------------------- */

/* A session with one life of another agent. When that is over, connect again. */
typedef struct weft_peer weft_peer;

/* A region that a peer has published. */
typedef struct weft_region weft_region;

/* Connects to an agent by its address, or by "host:port". Threads: any. */
weft_status weft_connect(weft_agent *agent, const char *address, uint64_t timeout_ns, weft_peer **peer);

/* Connects to the agent that these bytes are of; whoever has come in its place is not taken for it. Threads: any. */
weft_status weft_connect_metadata(weft_agent *agent, const void *bytes, size_t length, uint64_t timeout_ns, weft_peer **peer);

/* Connects to an agent by its name, looked up by the setting `rendezvous`. Threads: any. */
weft_status weft_connect_named(weft_agent *agent, const char *name, uint64_t timeout_ns, weft_peer **peer);

/* The peer's name. It is there as long as the handle. Threads: any. */
const char *weft_peer_name(const weft_peer *peer);

/* 1 while the session lives, else 0. Threads: any. */
int weft_peer_is_connected(const weft_peer *peer);

/* Looks a region up, waiting for it to be published if need be. Threads: any. */
weft_status weft_peer_region(weft_peer *peer, const char *name, uint64_t timeout_ns, weft_region **region);

/* Sends a notification by itself, which arrives once. Threads: any. */
weft_status weft_peer_notify(weft_peer *peer, const void *payload, size_t length);

/* Ends the session. Transfers under way end with an error. Threads: any. */
weft_status weft_peer_disconnect(weft_peer *peer);

/* Gives the handle back. The session goes on. Threads: last. */
void weft_peer_free(weft_peer *peer);

/* How many bytes the region has. Threads: any. */
uint64_t weft_region_length(const weft_region *region);

/* Gives the handle back. Threads: last. */
void weft_region_free(weft_region *region);

/* ---- Transfers ---------------------------------------------------------------------------------------------------------------------- */

/* A transfer under way. It goes on by itself, ends once, at its deadline at the latest, and after its end nobody touches its memory. */
typedef struct weft_transfer weft_transfer;

/* A transfer that was checked, and can be posted again and again. */
typedef struct weft_prepared weft_prepared;

typedef enum weft_direction {
    WEFT_READ = 0, /* from the peer */
    WEFT_WRITE = 1 /* to the peer */
} weft_direction;

/* Zero is the agent's own setting. */
typedef enum weft_switch { WEFT_AS_SET = 0, WEFT_ON = 1, WEFT_OFF = 2 } weft_switch;

/* `length` bytes from byte `offset` of a memory on. It never grows. */
typedef struct weft_span {
    uint64_t offset;
    uint64_t length;
} weft_span;

/* Spans of one memory here, paired byte by byte with spans of one region there; both lists hold as many bytes. Without any list it is all of
 * both, which must be of one size then. In a list of legs all have the same size. */
typedef struct weft_leg {
    size_t size;
    weft_memory *local;
    weft_region *remote;
    const weft_span *local_spans;
    size_t local_count;
    const weft_span *remote_spans;
    size_t remote_count;
} weft_leg;

typedef struct weft_transfer_options {
    size_t size;
    uint64_t deadline_ns;       /* from the post on; 0 for the setting `deadline` */
    const void *notification;   /* what the peer's application is told once the bytes are in place; NULL for nothing */
    size_t notification_length;
    weft_switch checksum;       /* whether to compare the bytes at both ends */
} weft_transfer_options;

/* How a transfer went. */
typedef struct weft_summary {
    size_t size;
    uint64_t bytes;
    uint64_t duration_ns; /* from the post to the end */
    uint32_t parts;
    uint32_t retries;
    char transport[32]; /* the one that carried most of it */
} weft_summary;

/* Starts a transfer of one or several legs. What is small is done at once, in this call; what is large goes on in the background. The lists
 * are copied. `options` may be NULL. Threads: any. */
weft_status weft_read(weft_peer *peer, const weft_leg *legs, size_t leg_count, const weft_transfer_options *options,
                      weft_transfer **transfer);
weft_status weft_write(weft_peer *peer, const weft_leg *legs, size_t leg_count, const weft_transfer_options *options,
                       weft_transfer **transfer);

/* Checks a transfer without starting it. Threads: any. */
weft_status weft_prepare(weft_peer *peer, weft_direction direction, const weft_leg *legs, size_t leg_count,
                         const weft_transfer_options *options, weft_prepared **prepared);

/* Starts it, at the cost of the transfer alone. Its deadline counts from here. Threads: any. */
weft_status weft_prepared_post(weft_prepared *prepared, weft_transfer **transfer);

/* Gives the handle back. Transfers that were posted go on. Threads: last. */
void weft_prepared_free(weft_prepared *prepared);

/* Has it ended? WEFT_PENDING, or how it has ended, as often as one asks. Makes progress meanwhile, so that asking in a loop is a way to wait.
 * `summary` may be NULL; it is filled in after WEFT_OK. Threads: any. */
weft_status weft_transfer_poll(weft_transfer *transfer, weft_summary *summary);

/* Waits for the end, but no longer than `timeout_ns`: then it is WEFT_PENDING. Threads: any. */
weft_status weft_transfer_wait(weft_transfer *transfer, uint64_t timeout_ns, weft_summary *summary);

/* Ends the transfer, if it has not ended, and waits until it has. After WEFT_OK nobody touches its memory any more; how it has ended,
 * weft_transfer_poll tells. Threads: any. */
weft_status weft_transfer_cancel(weft_transfer *transfer);

/* Gives the handle back. The transfer goes on: cancel it first if it should not. Threads: last. */
void weft_transfer_free(weft_transfer *transfer);

/* ---- Atomic operations -------------------------------------------------------------------------------------------------------------- */

/* On a word of a region that was published for reading and writing: eight bytes, little-endian, at a multiple of eight. They wait for the
 * answer, which is what the word held before, no longer than `deadline_ns` (0 for the setting `deadline`). They happen once or not at all, and
 * are atomic with each other, whoever makes them, and with the owner's own on the memory itself (<stdatomic.h>); not with transfers.
 * WEFT_ERROR_UNKNOWN_OUTCOME: it was sent, and nothing is known of it. Threads: any. */
weft_status weft_fetch_add(weft_peer *peer, const weft_region *region, uint64_t offset, uint64_t value, uint64_t deadline_ns,
                           uint64_t *before);

/* Stores `desired` if the word is `expected`; it was stored if `*before` is that. Threads: any. */
weft_status weft_compare_swap(weft_peer *peer, const weft_region *region, uint64_t offset, uint64_t expected, uint64_t desired,
                              uint64_t deadline_ns, uint64_t *before);

/* ---- Notifications ------------------------------------------------------------------------------------------------------------------ */

/* What a peer has told this agent. */
typedef struct weft_notification weft_notification;

/* Takes the next one, from whichever peer, waiting no longer than `timeout_ns`; WEFT_NONE if none comes. They arrive after the data that they
 * announce. Where nobody takes them, peers are held back in the end. Threads: any. */
weft_status weft_agent_notification(weft_agent *agent, uint64_t timeout_ns, weft_notification **notification);

/* What was told. It is there as long as the handle. Threads: any. */
weft_status weft_notification_payload(const weft_notification *notification, const void **payload, size_t *length);

/* Who told it, as a handle of its own. Threads: any. */
weft_status weft_notification_peer(const weft_notification *notification, weft_peer **peer);

/* Gives the handle back. Threads: last. */
void weft_notification_free(weft_notification *notification);

/* ---- Collectives -------------------------------------------------------------------------------------------------------------------- */

/* One rank of a group of processes that call the same things in the same order. */
typedef struct weft_communicator weft_communicator;

/* A collective under way. */
typedef struct weft_call weft_call;

typedef enum weft_datatype {
    WEFT_F64 = 0,
    WEFT_F32 = 1,
    WEFT_F16 = 2,
    WEFT_BF16 = 3,
    WEFT_FP8_E4M3 = 4,
    WEFT_FP8_E5M2 = 5,
    WEFT_I8 = 6,
    WEFT_I16 = 7,
    WEFT_I32 = 8,
    WEFT_I64 = 9,
    WEFT_U8 = 10,
    WEFT_U16 = 11,
    WEFT_U32 = 12,
    WEFT_U64 = 13
} weft_datatype;

typedef enum weft_reduction { WEFT_SUM = 0, WEFT_PROD = 1, WEFT_MIN = 2, WEFT_MAX = 3, WEFT_AVG = 4 } weft_reduction;

typedef struct weft_join_options {
    size_t size;
    const char *name;     /* the group's: the same for all its ranks, and for no other group of the job */
    uint32_t rank;
    uint32_t rank_count;
    uint64_t timeout_ns;  /* how long to wait for all ranks to come; 0 for half a minute */
    uint64_t deadline_ns; /* of calls that name none; 0 for five minutes */
} weft_join_options;

typedef struct weft_call_options {
    size_t size;
    uint64_t deadline_ns;   /* from the start on; 0 for that of the communicator */
    const char *algorithm;  /* by name, as `weft explain` prints it; NULL for the fastest. The same on all ranks */
    int32_t deterministic;  /* not 0: the same bits wherever the ranks are. The same on all ranks */
    int32_t all_or_nothing; /* not 0: an output that a failed call leaves as it was */
} weft_call_options;

/* Joins all processes that a launcher has started together (torchrun, MPI, Slurm), with an agent that is made for it. `abi_version` is
 * WEFT_ABI_VERSION. All ranks give the same name. Threads: any. */
weft_status weft_communicator_from_env(uint32_t abi_version, const char *name, weft_communicator **communicator);

/* Joins a group by its name; the agent needs the setting `rendezvous`, where its ranks find each other. Threads: any. */
weft_status weft_communicator_join(weft_agent *agent, const weft_join_options *options, weft_communicator **communicator);

/* Which rank this is, and of how many. Threads: any. */
uint32_t weft_communicator_rank(const weft_communicator *communicator);
uint32_t weft_communicator_size(const weft_communicator *communicator);

/* After a collective has failed: a group of the ranks that are left, all of which must call this. Threads: any. */
weft_status weft_communicator_shrink(weft_communicator *communicator, uint64_t timeout_ns, weft_communicator **left);

/* Gives the handle back. What is under way is given up, and the other ranks are told. Threads: last. */
void weft_communicator_free(weft_communicator *communicator);

/*
 * All collectives take host memory, aligned as their elements are. They run in the order in which they are called. With `call` NULL they wait
 * for their end; otherwise they start, and until the end, which weft_call_wait tells, nobody may touch the buffers. `options` may be NULL. A
 * call that fails fails on every rank, with the rank that is to blame (weft_last_error_details), and the communicator is of no further use:
 * shrink it. `count` is the number of elements that one rank gives to one other, or to all.
 *
 *   collective       input elements  output elements  in place where
 *   broadcast        count           count            always: it has one buffer
 *   all_reduce       count           count            output is input
 *   reduce           count           count at root    output is input
 *   all_gather       count           count x ranks    input is the own block of output
 *   gather           count           count x ranks    input is the own block of output    (output at root only)
 *   scatter          count x ranks   count            output is the own block of input    (input at root only)
 *   reduce_scatter   count x ranks   count            output is the own block of input
 *   all_to_all       count x ranks   count x ranks    output is input
 *   send, receive    count           count            beside the order of all others, between two ranks
 */

/* Nobody ends before everybody has begun. Threads: any. */
weft_status weft_barrier(weft_communicator *communicator, const weft_call_options *options, weft_call **call);

/* Every rank ends with the root's data. Threads: any. */
weft_status weft_broadcast(weft_communicator *communicator, void *data, size_t count, weft_datatype datatype, uint32_t root,
                           const weft_call_options *options, weft_call **call);

/* Every rank ends with the reduction of all inputs. Threads: any. */
weft_status weft_all_reduce(weft_communicator *communicator, const void *input, void *output, size_t count, weft_datatype datatype,
                            weft_reduction reduction, const weft_call_options *options, weft_call **call);

/* The root ends with the reduction of all inputs. Threads: any. */
weft_status weft_reduce(weft_communicator *communicator, const void *input, void *output, size_t count, weft_datatype datatype,
                        weft_reduction reduction, uint32_t root, const weft_call_options *options, weft_call **call);

/* Every rank ends with all inputs, one after the other. Threads: any. */
weft_status weft_all_gather(weft_communicator *communicator, const void *input, void *output, size_t count, weft_datatype datatype,
                            const weft_call_options *options, weft_call **call);

/* The root ends with all inputs, one after the other. Threads: any. */
weft_status weft_gather(weft_communicator *communicator, const void *input, void *output, size_t count, weft_datatype datatype,
                        uint32_t root, const weft_call_options *options, weft_call **call);

/* Rank r ends with the root's block r. Threads: any. */
weft_status weft_scatter(weft_communicator *communicator, const void *input, void *output, size_t count, weft_datatype datatype,
                         uint32_t root, const weft_call_options *options, weft_call **call);

/* Rank r ends with the reduction of everyone's block r. Threads: any. */
weft_status weft_reduce_scatter(weft_communicator *communicator, const void *input, void *output, size_t count, weft_datatype datatype,
                                weft_reduction reduction, const weft_call_options *options, weft_call **call);

/* Block r of rank s becomes block s of rank r. Threads: any. */
weft_status weft_all_to_all(weft_communicator *communicator, const void *input, void *output, size_t count, weft_datatype datatype,
                            const weft_call_options *options, weft_call **call);

/* Sends to one rank, which must receive as much. Threads: any. */
weft_status weft_send(weft_communicator *communicator, const void *data, size_t count, weft_datatype datatype, uint32_t to,
                      const weft_call_options *options, weft_call **call);

/* Receives what one rank sends. Threads: any. */
weft_status weft_receive(weft_communicator *communicator, void *data, size_t count, weft_datatype datatype, uint32_t from,
                         const weft_call_options *options, weft_call **call);

/* Has it ended? WEFT_PENDING, or how. Makes progress meanwhile. Threads: any. */
weft_status weft_call_poll(weft_call *call);

/* Waits for the end, but no longer than `timeout_ns`: then it is WEFT_PENDING. Threads: any. */
weft_status weft_call_wait(weft_call *call, uint64_t timeout_ns);

/* Gives the handle back. The call goes on. Threads: last. */
void weft_call_free(weft_call *call);

#ifdef __cplusplus
}
#endif

#endif
