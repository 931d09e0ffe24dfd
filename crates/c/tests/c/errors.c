/* Every status that a caller can be given, each by what it is for. A panic is not among them: nothing that a caller does brings one about. */
#include "check.h"
#include <pthread.h>

static const char *program;
static int seen;

/* A status that is met for the first time, and what is known of it. */
#define MEET(expected, call)                                                                                                     \
    do {                                                                                                                         \
        IS(expected, call);                                                                                                      \
        weft_error details = {.size = sizeof details};                                                                           \
        OK(weft_last_error_details(&details));                                                                                   \
        CHECK(details.status == expected && details.text && details.text[0]);                                                    \
        printf("%-28s %s\n", weft_status_name(expected), details.text);                                                          \
        fflush(stdout);                                                                                                          \
        seen++;                                                                                                                  \
    } while (0)

static void calls(weft_agent *agent) {
    weft_agent *refused;
    weft_memory *memory;
    weft_communicator *group;
    weft_peer *peer;
    char bytes[64];
    MEET(WEFT_ERROR_INVALID_ARGUMENT, weft_publish(agent, "x", NULL, WEFT_ACCESS_READ));
    MEET(WEFT_ERROR_VERSION, weft_agent_start(WEFT_ABI_VERSION + 0x10000, "later", NULL, 0, &refused));
    IS(WEFT_ERROR_VERSION, weft_communicator_from_env(WEFT_ABI_VERSION + 1, "later", &group));
    const char *settings[] = {"tcp.conections=2"};
    MEET(WEFT_ERROR_SETTINGS, weft_agent_start(WEFT_ABI_VERSION, "wrong", settings, 1, &refused));
    CHECK(strstr(weft_last_error(), "tcp.connections"));
    OK(weft_memory_allocate(agent, 64, NULL, &memory));
    OK(weft_publish(agent, "x", memory, WEFT_ACCESS_READ));
    MEET(WEFT_ERROR_NAME, weft_publish(agent, "x", memory, WEFT_ACCESS_READ));
    IS(WEFT_ERROR_NAME, weft_withdraw(agent, "y"));
    OK(weft_withdraw(agent, "x"));
    weft_memory_free(memory);
    /* Where there is a GPU, this is not its memory. */
    weft_memory_options device = {.size = sizeof device, .place = WEFT_PLACE_GPU};
    MEET(WEFT_ERROR_GPU, weft_memory_register(agent, bytes, sizeof bytes, &device, &memory));
    MEET(WEFT_ERROR_SYSTEM, weft_memory_allocate(agent, (size_t)1 << 60, NULL, &memory));
    weft_error details = {.size = sizeof details};
    OK(weft_last_error_details(&details));
    CHECK(details.os_error > 0);
    MEET(WEFT_ERROR_RENDEZVOUS, weft_connect_named(agent, "somebody", SECOND, &peer));
    IS(WEFT_ERROR_RENDEZVOUS, weft_communicator_from_env(WEFT_ABI_VERSION, "nobody", &group));
    MEET(WEFT_ERROR_CONNECT, weft_connect(agent, "127.0.0.1:1", 200 * MILLISECOND, &peer));
    IS(WEFT_ERROR_CONNECT, weft_connect(agent, "no such host:1", LONG, &peer));
    CHECK(peer == NULL);
}

static void *scribble(void *given) {
    volatile unsigned char *bytes = given;
    for (unsigned at = 0; bytes[DATA - 1] != 255; at = (at + 61) % (DATA - 1)) bytes[at]++;
    return NULL;
}

/* Bytes that change while they are compared: this side's own, which nobody else may touch meanwhile. */
static void spoils(weft_agent *agent, weft_peer *peer, weft_region *data) {
    weft_memory *memory;
    weft_transfer *transfer;
    pthread_t thread;
    OK(weft_memory_allocate(agent, DATA, NULL, &memory));
    unsigned char *bytes = weft_memory_address(memory);
    weft_span but_one = {0, DATA - 1};
    weft_leg leg = {sizeof leg, memory, data, &but_one, 1, &but_one, 1};
    weft_transfer_options options = {.size = sizeof options, .deadline_ns = LONG, .checksum = WEFT_ON};
    CHECK(pthread_create(&thread, NULL, scribble, bytes) == 0);
    weft_status status = WEFT_OK;
    for (int round = 0; round < 1000 && status == WEFT_OK; round++) {
        OK(weft_read(peer, &leg, 1, &options, &transfer));
        status = weft_transfer_wait(transfer, WEFT_FOREVER, NULL);
        weft_transfer_free(transfer);
    }
    bytes[DATA - 1] = 255;
    pthread_join(thread, NULL);
    MEET(WEFT_ERROR_CHECKSUM, status);
    weft_memory_free(memory);
}

static void peers(weft_agent *agent) {
    weft_peer *peer;
    weft_region *data, *fixed, *nothing;
    weft_memory *memory;
    weft_transfer *transfer;
    uint64_t word;
    child owner = spawn(program, "owner", "transports=tcp", NULL);
    OK(weft_connect(agent, owner.line, LONG, &peer));
    OK(weft_peer_region(peer, "data", LONG, &data));
    OK(weft_peer_region(peer, "fixed", LONG, &fixed));
    MEET(WEFT_ERROR_TIMED_OUT, weft_peer_region(peer, "nothing", 20 * MILLISECOND, &nothing));
    CHECK(nothing == NULL);
    OK(weft_memory_allocate(agent, 4096, NULL, &memory));
    weft_leg to_fixed = {sizeof to_fixed, memory, fixed, NULL, 0, NULL, 0};
    weft_span page = {4096, 4096}, own = {0, 4096};
    weft_leg of_data = {sizeof of_data, memory, data, &own, 1, &page, 1};
    OK(weft_write(peer, &to_fixed, 1, NULL, &transfer));
    MEET(WEFT_ERROR_REFUSED, weft_transfer_wait(transfer, WEFT_FOREVER, NULL));
    weft_transfer_free(transfer);
    IS(WEFT_ERROR_REFUSED, weft_fetch_add(peer, data, 3, 1, LONG, &word));

    freeze(&owner);
    weft_transfer_options soon = {.size = sizeof soon, .deadline_ns = 100 * MILLISECOND};
    OK(weft_read(peer, &of_data, 1, &soon, &transfer));
    MEET(WEFT_ERROR_EXPIRED, weft_transfer_wait(transfer, WEFT_FOREVER, NULL));
    weft_transfer_free(transfer);
    OK(weft_read(peer, &of_data, 1, NULL, &transfer));
    OK(weft_transfer_cancel(transfer));
    MEET(WEFT_ERROR_CANCELLED, weft_transfer_wait(transfer, WEFT_FOREVER, NULL));
    weft_transfer_free(transfer);
    MEET(WEFT_ERROR_UNKNOWN_OUTCOME, weft_fetch_add(peer, data, 0, 1, 100 * MILLISECOND, &word));
    weft_error details = {.size = sizeof details};
    OK(weft_last_error_details(&details));
    CHECK(details.may_have_happened == 1);
    weft_status status = WEFT_OK;
    for (int told = 0; told < 1000000 && status == WEFT_OK; told++) status = weft_peer_notify(peer, "more", 4);
    MEET(WEFT_ERROR_FULL, status);
    end(&owner);
    nap(50 * MILLISECOND);
    status = weft_read(peer, &of_data, 1, &soon, &transfer);
    if (status == WEFT_OK) status = weft_transfer_wait(transfer, WEFT_FOREVER, NULL);
    MEET(WEFT_ERROR_PEER_LOST, status);
    weft_transfer_free(transfer), weft_memory_free(memory);
    weft_region_free(data), weft_region_free(fixed), weft_peer_free(peer);
}

/* Reads all of what the first process has published, again and again. */
static int play_reader(const char *address) {
    weft_agent *agent = start("reader", NULL, NULL);
    weft_peer *peer;
    weft_region *data;
    weft_memory *memory;
    OK(weft_connect(agent, address, LONG, &peer));
    OK(weft_peer_region(peer, "mine", LONG, &data));
    OK(weft_memory_allocate(agent, weft_region_length(data), NULL, &memory));
    weft_leg all = {sizeof all, memory, data, NULL, 0, NULL, 0};
    weft_status status = WEFT_OK;
    for (int round = 0; status == WEFT_OK; round++) {
        weft_transfer *transfer;
        if (round == 1) say("reading");
        status = weft_read(peer, &all, 1, NULL, &transfer);
        if (status == WEFT_OK) status = weft_transfer_wait(transfer, WEFT_FOREVER, NULL);
        weft_transfer_free(transfer);
    }
    wait_for_the_end();
    return 0;
}

/* A reader that is frozen in the middle of a copy holds the memory; one that dies there lets go of it. */
static void freezes(weft_agent *agent) {
    enum { LARGE = 64 << 20 };
    weft_status status = WEFT_OK;
    for (int attempt = 0; attempt < 50 && status == WEFT_OK; attempt++) {
        weft_memory *memory;
        OK(weft_memory_allocate(agent, LARGE, NULL, &memory));
        OK(weft_publish(agent, "mine", memory, WEFT_ACCESS_READ));
        child reader = spawn(program, "reader", weft_agent_address(agent), NULL);
        nap(10 * MILLISECOND);
        freeze(&reader);
        status = weft_memory_deregister(memory, 50 * MILLISECOND);
        if (status != WEFT_OK) MEET(WEFT_ERROR_STILL_IN_USE, status);
        end(&reader);
        /* The handle has stayed. */
        if (status != WEFT_OK) OK(weft_memory_deregister(memory, LONG));
    }
    IS(WEFT_ERROR_STILL_IN_USE, status);
}

static weft_communicator *join(weft_agent *agent, const char *name, uint32_t rank) {
    weft_communicator *group;
    weft_join_options options = {.size = sizeof options, .name = name, .rank = rank, .rank_count = 2, .timeout_ns = LONG};
    OK(weft_communicator_join(agent, &options, &group));
    return group;
}

static int play_rank(const char *rendezvous, const char *name) {
    say("here");
    weft_agent *agent = start(name, rendezvous, NULL);
    uint32_t own = name[0] == 'd' ? 1 : 0;
    weft_communicator *group = join(agent, name, own);
    OK(weft_barrier(group, NULL, NULL));
    wait_for_the_end();
    return 0;
}

/* The other rank dies: it is named. The other one, the lower, only freezes: nobody may go on without it. */
static void groups(const char *directory) {
    char rendezvous[600];
    snprintf(rendezvous, sizeof rendezvous, "rendezvous=dir:%s", directory);
    weft_agent *agent = start("rank", rendezvous, NULL);
    weft_call_options soon = {.size = sizeof soon, .deadline_ns = 300 * MILLISECOND};
    weft_communicator *left;

    child doomed = spawn(program, "rank", rendezvous, "doomed");
    weft_communicator *group = join(agent, "doomed", 0);
    OK(weft_barrier(group, NULL, NULL));
    end(&doomed);
    MEET(WEFT_ERROR_COLLECTIVE, weft_barrier(group, NULL, NULL));
    weft_error details = {.size = sizeof details};
    OK(weft_last_error_details(&details));
    CHECK(details.rank == 1);
    OK(weft_communicator_shrink(group, LONG, &left));
    CHECK(weft_communicator_size(left) == 1 && weft_communicator_rank(left) == 0);
    OK(weft_barrier(left, NULL, NULL));
    weft_communicator_free(left), weft_communicator_free(group);

    child frozen = spawn(program, "rank", rendezvous, "frozen");
    group = join(agent, "frozen", 1);
    OK(weft_barrier(group, NULL, NULL));
    freeze(&frozen);
    IS(WEFT_ERROR_COLLECTIVE, weft_barrier(group, &soon, NULL));
    MEET(WEFT_ERROR_NO_QUORUM, weft_communicator_shrink(group, SECOND, &left));
    end(&frozen);
    weft_communicator_free(group), weft_agent_free(agent);
}

static void forks(weft_agent *agent) {
    fflush(stdout);
    pid_t forked = fork();
    CHECK(forked >= 0);
    if (forked == 0) {
        MEET(WEFT_ERROR_FORKED, weft_withdraw(agent, "x"));
        _exit(0);
    }
    int status;
    CHECK(waitpid(forked, &status, 0) == forked && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    seen++;
}

int main(int count, char **arguments) {
    program = arguments[0];
    if (count > 2 && strcmp(arguments[1], "owner") == 0) return play_owner(arguments[2]);
    if (count > 2 && strcmp(arguments[1], "reader") == 0) return play_reader(arguments[2]);
    if (count > 3 && strcmp(arguments[1], "rank") == 0) return play_rank(arguments[2], arguments[3]);
    CHECK(count > 1);
    weft_agent *agent = start("errors", NULL, NULL), *far = start("errors-far", "transports=tcp", NULL);
    calls(agent);
    peers(far);
    freezes(agent);
    child owner = spawn(program, "owner", "deadline=30s", NULL);
    weft_peer *peer;
    weft_region *data;
    OK(weft_connect(agent, owner.line, LONG, &peer));
    OK(weft_peer_region(peer, "data", LONG, &data));
    spoils(agent, peer, data);
    weft_region_free(data), weft_peer_free(peer);
    end(&owner);
    groups(arguments[1]);
    forks(agent);
    OK(weft_agent_close(agent));
    weft_memory *memory;
    weft_notification *told;
    MEET(WEFT_ERROR_STOPPED, weft_memory_allocate(agent, 64, NULL, &memory));
    IS(WEFT_ERROR_STOPPED, weft_agent_notification(agent, LONG, &told));
    weft_agent_free(agent), weft_agent_free(far);
    /* All of the header's, but for the three that are no failures and the panic. */
    printf("%d statuses\n", seen);
    CHECK(seen == 21);
    say("done");
    return 0;
}
