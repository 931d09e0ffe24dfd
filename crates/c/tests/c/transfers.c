/* Two processes: what an application does with them, how it sleeps, and what it learns when the other one freezes or dies. */
#include "check.h"
#include <poll.h>

static unsigned char expected(size_t at) { return (unsigned char)(at * 7 + at / 4096); }

static void reads_and_writes(weft_agent *agent, weft_peer *peer, weft_region *data) {
    enum { BLOCK = 8192, BLOCKS = 100 };
    static unsigned char own[BLOCK * BLOCKS];
    weft_memory *foreign, *allocated;
    weft_transfer *transfer;
    weft_prepared *prepared;
    OK(weft_memory_register(agent, own, sizeof own, NULL, &foreign));
    OK(weft_memory_allocate(agent, sizeof own, NULL, &allocated));
    weft_memory *both[] = {foreign, allocated};
    weft_span here[BLOCKS], there[BLOCKS];
    for (int at = 0; at < BLOCKS; at++) {
        here[at] = (weft_span){(uint64_t)at * BLOCK, BLOCK};
        there[at] = (weft_span){4096 + (uint64_t)((at * 37) % BLOCKS) * BLOCK, BLOCK};
    }
    for (int kind = 0; kind < 2; kind++) {
        unsigned char *bytes = weft_memory_address(both[kind]);
        CHECK(weft_memory_length(both[kind]) == sizeof own);
        weft_leg leg = {sizeof leg, both[kind], data, here, BLOCKS, there, BLOCKS};
        weft_transfer_options options = {.size = sizeof options, .deadline_ns = LONG, .checksum = kind ? WEFT_ON : WEFT_OFF};
        weft_summary summary = {.size = sizeof summary};
        OK(weft_read(peer, &leg, 1, &options, &transfer));
        OK(weft_transfer_wait(transfer, WEFT_FOREVER, &summary));
        CHECK(summary.bytes == sizeof own && summary.parts > 0 && strcmp(summary.transport, "shared_memory") == 0);
        weft_transfer_free(transfer);
        for (int at = 0; at < BLOCKS; at++)
            for (int byte = 0; byte < BLOCK; byte += 511) CHECK(bytes[at * BLOCK + byte] == expected(there[at].offset + byte));
        /* The same again, prepared: written back, and read by two legs. */
        OK(weft_prepare(peer, WEFT_WRITE, &leg, 1, &options, &prepared));
        for (int round = 0; round < 3; round++) {
            OK(weft_prepared_post(prepared, &transfer));
            weft_status status;
            while ((status = weft_transfer_poll(transfer, &summary)) == WEFT_PENDING) {}
            CHECK(status == WEFT_OK && summary.bytes == sizeof own);
            weft_transfer_free(transfer);
        }
        weft_prepared_free(prepared);
        weft_leg halves[] = {{sizeof leg, both[kind], data, here, BLOCKS / 2, there, BLOCKS / 2},
                             {sizeof leg, both[kind], data, here + BLOCKS / 2, BLOCKS / 2, there + BLOCKS / 2, BLOCKS / 2}};
        memset(bytes, 0, sizeof own);
        OK(weft_read(peer, halves, 2, NULL, &transfer));
        OK(weft_transfer_wait(transfer, LONG, NULL));
        weft_transfer_free(transfer);
        CHECK(bytes[sizeof own - 1] == expected(there[BLOCKS - 1].offset + BLOCK - 1));
    }
    /* Two registrations of the same bytes are two: one ends, and the other one goes on. */
    weft_memory *again;
    OK(weft_memory_register(agent, own, sizeof own, NULL, &again));
    OK(weft_memory_deregister(foreign, LONG));
    weft_leg leg = {sizeof leg, again, data, here, BLOCKS, there, BLOCKS};
    OK(weft_read(peer, &leg, 1, NULL, &transfer));
    OK(weft_transfer_wait(transfer, LONG, NULL));
    weft_transfer_free(transfer);
    OK(weft_memory_deregister(again, LONG));
    weft_memory_free(allocated);
}

static void words(weft_peer *peer, weft_region *data) {
    uint64_t before = 99;
    OK(weft_fetch_add(peer, data, 16, 5, LONG, &before));
    CHECK(before == 0);
    OK(weft_fetch_add(peer, data, 16, 5, 0, &before));
    CHECK(before == 5);
    OK(weft_compare_swap(peer, data, 16, 10, 42, LONG, &before));
    CHECK(before == 10);
    OK(weft_compare_swap(peer, data, 16, 10, 43, LONG, &before));
    CHECK(before == 42);
}

static void readable(int fd) {
    struct pollfd waiting = {fd, POLLIN, 0};
    uint64_t times;
    CHECK(poll(&waiting, 1, (int)(LONG / MILLISECOND)) == 1);
    CHECK(read(fd, &times, sizeof times) == sizeof times && times > 0);
}

/* Sleeps on the descriptor alone: for the end of a transfer, and for a notification. */
static void sleeps(const char *program, weft_agent *agent, weft_peer *peer, weft_region *data) {
    int fd, again;
    OK(weft_agent_event_fd(agent, &fd));
    OK(weft_agent_event_fd(agent, &again));
    CHECK(fd == again);
    weft_memory *memory;
    weft_transfer *transfer;
    weft_notification *told;
    OK(weft_memory_allocate(agent, DATA, NULL, &memory));
    weft_leg all = {sizeof all, memory, data, NULL, 0, NULL, 0};
    for (int round = 0; round < 20; round++) {
        OK(weft_read(peer, &all, 1, NULL, &transfer));
        weft_status status;
        while ((status = weft_transfer_poll(transfer, NULL)) == WEFT_PENDING) readable(fd);
        OK(status);
        weft_transfer_free(transfer);
    }
    /* Somebody who connects to this agent and tells it something, a moment later. */
    IS(WEFT_NONE, weft_agent_notification(agent, 0, &told));
    CHECK(told == NULL);
    child teller = spawn(program, "teller", weft_agent_address(agent), NULL);
    const void *payload;
    size_t length;
    for (int expected_number = 0; expected_number < 10; expected_number++) {
        while (weft_agent_notification(agent, 0, &told) == WEFT_NONE) readable(fd);
        CHECK(told);
        OK(weft_notification_payload(told, &payload, &length));
        CHECK(length == 1 && *(const char *)payload == expected_number);
        weft_peer *from;
        OK(weft_notification_peer(told, &from));
        CHECK(strcmp(weft_peer_name(from), "teller") == 0);
        weft_peer_free(from), weft_notification_free(told);
    }
    end(&teller);
    IS(WEFT_NONE, weft_agent_notification(agent, 20 * MILLISECOND, &told));
    weft_memory_free(memory);
}

static int play_teller(const char *address) {
    weft_agent *agent = start("teller", NULL, NULL);
    weft_peer *peer;
    OK(weft_connect(agent, address, LONG, &peer));
    say("here");
    for (char number = 0; number < 10; number++) {
        nap(10 * MILLISECOND);
        OK(weft_peer_notify(peer, &number, 1));
    }
    wait_for_the_end();
    return 0;
}

/* A frozen peer holds nobody past the deadline, and a cancel is a fence. */
static void cancels(weft_peer *peer, weft_region *data, weft_memory *memory, child *owner) {
    weft_transfer *transfer;
    unsigned char *bytes = weft_memory_address(memory);
    weft_leg all = {sizeof all, memory, data, NULL, 0, NULL, 0};
    freeze(owner);
    weft_transfer_options options = {.size = sizeof options, .deadline_ns = LONG};
    uint64_t began = now_ns();
    OK(weft_read(peer, &all, 1, &options, &transfer));
    IS(WEFT_PENDING, weft_transfer_wait(transfer, 20 * MILLISECOND, NULL));
    OK(weft_transfer_cancel(transfer));
    memset(bytes, 7, DATA);
    IS(WEFT_ERROR_CANCELLED, weft_transfer_poll(transfer, NULL));
    CHECK(now_ns() - began < LONG);
    thaw(owner);
    nap(100 * MILLISECOND);
    for (size_t at = 0; at < DATA; at++) CHECK(bytes[at] == 7);
    OK(weft_transfer_cancel(transfer));
    weft_transfer_free(transfer);
}

static void dies(weft_peer *peer, weft_region *data, weft_memory *memory, child *owner) {
    weft_leg all = {sizeof all, memory, data, NULL, 0, NULL, 0};
    weft_transfer *transfer;
    weft_error details = {.size = sizeof details};
    freeze(owner);
    weft_transfer_options options = {.size = sizeof options, .deadline_ns = LONG};
    OK(weft_read(peer, &all, 1, &options, &transfer));
    end(owner);
    uint64_t began = now_ns();
    IS(WEFT_ERROR_PEER_LOST, weft_transfer_wait(transfer, WEFT_FOREVER, NULL));
    OK(weft_last_error_details(&details));
    CHECK(now_ns() - began < LONG / 2);
    CHECK(strcmp(details.peer, "owner") == 0 && strcmp(details.transport, "tcp") == 0);
    CHECK(details.bytes_total == DATA && details.bytes_done < DATA);
    uint64_t done = 0;
    for (size_t at = 0; at < details.done_count; at++) done += details.done[at].end - details.done[at].begin;
    CHECK(done == details.bytes_done);
    weft_transfer_free(transfer);
    CHECK(!weft_peer_is_connected(peer));
}

int main(int count, char **arguments) {
    if (count > 2 && strcmp(arguments[1], "teller") == 0) return play_teller(arguments[2]);
    if (count > 1) return play_owner(count > 2 ? arguments[2] : NULL);
    weft_peer *peer;
    weft_region *data;
    child near = spawn(arguments[0], "owner", NULL, NULL);
    weft_agent *agent = start("first", NULL, NULL);
    OK(weft_connect(agent, near.line, LONG, &peer));
    CHECK(strcmp(weft_peer_name(peer), "owner") == 0 && weft_peer_is_connected(peer));
    OK(weft_peer_region(peer, "data", LONG, &data));
    CHECK(weft_region_length(data) == DATA);
    reads_and_writes(agent, peer, data);
    words(peer, data);
    sleeps(arguments[0], agent, peer, data);
    weft_region_free(data), weft_peer_free(peer);
    end(&near);
    weft_agent_free(agent);

    child far = spawn(arguments[0], "owner", "transports=tcp", NULL);
    agent = start("second", "transports=tcp", NULL);
    weft_memory *memory;
    OK(weft_memory_allocate(agent, DATA, NULL, &memory));
    OK(weft_connect(agent, far.line, LONG, &peer));
    OK(weft_peer_region(peer, "data", LONG, &data));
    cancels(peer, data, memory, &far);
    dies(peer, data, memory, &far);
    weft_memory_free(memory), weft_region_free(data), weft_peer_free(peer), weft_agent_free(agent);
    say("done");
    return 0;
}
