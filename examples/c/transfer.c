/*
 * Two processes: one publishes blocks, the other one reads three of them and writes an answer, which the first is told of. Then the owner is
 * killed, and a read from it ends with an error.
 *
 *     cargo build -p weft-c
 *     cc -Icrates/c/include examples/c/transfer.c -Ltarget/debug -lweft -Wl,-rpath,target/debug -o transfer
 *     ./transfer
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include <weft.h>

enum { BLOCK = 16384, BLOCKS = 64 };

static const uint64_t SECOND = 1000000000;

static void must(weft_status status, const char *what) {
    if (status != WEFT_OK) {
        fprintf(stderr, "%s: %s: %s\n", what, weft_status_name(status), weft_last_error());
        exit(1);
    }
}

/* Publishes blocks that are filled with their own numbers, says where it is, waits for an answer, and says that it has come. */
static void own(int out) {
    weft_agent *agent;
    weft_memory *cache;
    weft_notification *told;
    const void *bytes;
    size_t length;

    must(weft_agent_start(WEFT_ABI_VERSION, "owner", NULL, 0, &agent), "starting the owner");
    must(weft_memory_allocate(agent, BLOCK * BLOCKS, NULL, &cache), "allocating");
    for (int block = 0; block < BLOCKS; block++) memset((char *)weft_memory_address(cache) + block * BLOCK, block, BLOCK);
    must(weft_publish(agent, "blocks", cache, WEFT_ACCESS_READ_WRITE), "publishing");

    /* Whoever has these bytes can connect to this life of this agent. How they travel is up to the program. */
    must(weft_agent_metadata(agent, &bytes, &length), "metadata");
    if (write(out, &length, sizeof length) != sizeof length || write(out, bytes, length) != (ssize_t)length) exit(1);

    must(weft_agent_notification(agent, 30 * SECOND, &told), "waiting for the answer");
    must(weft_notification_payload(told, &bytes, &length), "looking at the answer");
    printf("the owner is told \"%.*s\", and block 0 holds %d\n", (int)length, (const char *)bytes,
           *(char *)weft_memory_address(cache));
    weft_notification_free(told);
    if (write(out, "!", 1) != 1) exit(1);
    pause(); /* until it is killed */
}

int main(void) {
    int way[2];
    if (pipe(way)) return 1;
    setvbuf(stdout, NULL, _IOLBF, 0); /* so that the lines of both processes come in their order */
    pid_t owner = fork(); /* before there is an agent: it would belong to the parent */
    if (owner == 0) {
        close(way[0]);
        own(way[1]);
        return 1;
    }
    close(way[1]);

    char metadata[4096];
    size_t length = 0;
    if (read(way[0], &length, sizeof length) != sizeof length || length > sizeof metadata) return 1;
    if (read(way[0], metadata, length) != (ssize_t)length) return 1;

    weft_agent *agent;
    weft_memory *mine;
    weft_peer *peer;
    weft_region *theirs;
    weft_transfer *transfer;
    const char *settings[] = {"deadline=5s"};
    must(weft_agent_start(WEFT_ABI_VERSION, "reader", settings, 1, &agent), "starting the reader");
    must(weft_memory_allocate(agent, BLOCK * 3, NULL, &mine), "allocating");
    must(weft_connect_metadata(agent, metadata, length, 5 * SECOND, &peer), "connecting");
    must(weft_peer_region(peer, "blocks", 5 * SECOND, &theirs), "looking the region up");

    /* Three blocks from anywhere, to one place. */
    weft_span here = {0, BLOCK * 3};
    weft_span there[] = {{42 * BLOCK, BLOCK}, {17 * BLOCK, BLOCK}, {7 * BLOCK, BLOCK}};
    weft_leg blocks = {sizeof blocks, mine, theirs, &here, 1, there, 3};
    weft_transfer_options options = {.size = sizeof options, .deadline_ns = 2 * SECOND, .checksum = WEFT_ON};
    weft_summary summary = {.size = sizeof summary};
    must(weft_read(peer, &blocks, 1, &options, &transfer), "posting a read");
    must(weft_transfer_wait(transfer, WEFT_FOREVER, &summary), "reading");
    weft_transfer_free(transfer);
    char *bytes = weft_memory_address(mine);
    printf("read %llu bytes over %s: blocks %d, %d and %d\n", (unsigned long long)summary.bytes, summary.transport, bytes[0],
           bytes[BLOCK], bytes[2 * BLOCK]);

    /* One block back, and a word about it that arrives after it. */
    memset(bytes, 99, BLOCK);
    weft_span block = {0, BLOCK};
    weft_leg answer = {sizeof answer, mine, theirs, &block, 1, &block, 1};
    options.notification = "there you are";
    options.notification_length = strlen(options.notification);
    must(weft_write(peer, &answer, 1, &options, &transfer), "posting a write");
    must(weft_transfer_wait(transfer, WEFT_FOREVER, NULL), "writing");
    weft_transfer_free(transfer);
    if (read(way[0], metadata, 1) != 1) return 1;

    /* Nothing that is asked of a dead process takes longer than its deadline. */
    kill(owner, SIGKILL);
    waitpid(owner, NULL, 0);
    weft_status status = weft_read(peer, &blocks, 1, &options, &transfer);
    if (status == WEFT_OK) status = weft_transfer_wait(transfer, WEFT_FOREVER, NULL);
    printf("after the owner's death: %s\n", weft_status_name(status));
    weft_transfer_free(transfer);

    weft_region_free(theirs);
    weft_peer_free(peer);
    must(weft_memory_deregister(mine, SECOND), "deregistering");
    weft_agent_free(agent);
    return status == WEFT_ERROR_PEER_LOST ? 0 : 1;
}
