/* Memory of a GPU: what Weft allocates there and what the program has there goes to and from host memory of a peer. */
#include "check.h"
#include <dlfcn.h>

enum { BYTES = 1 << 20 };

/* What `cudaMalloc` would give, without anything of CUDA's to compile with. */
static void *allocate_by_the_driver(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    CHECK(driver);
    int (*init)(unsigned) = (int (*)(unsigned))dlsym(driver, "cuInit");
    int (*retain)(void **, int) = (int (*)(void **, int))dlsym(driver, "cuDevicePrimaryCtxRetain");
    int (*enter)(void *) = (int (*)(void *))dlsym(driver, "cuCtxSetCurrent");
    int (*allocate)(uint64_t *, size_t) = (int (*)(uint64_t *, size_t))dlsym(driver, "cuMemAlloc_v2");
    void *context;
    uint64_t address;
    CHECK(init && retain && enter && allocate);
    CHECK(init(0) == 0 && retain(&context, 0) == 0 && enter(context) == 0 && allocate(&address, BYTES) == 0);
    return (void *)(uintptr_t)address;
}

int main(void) {
    weft_agent *owner = start("owner", NULL, NULL), *reader = start("reader", NULL, NULL);
    weft_memory_options device = {.size = sizeof device, .place = WEFT_PLACE_GPU, .device = 0};
    weft_memory *theirs[2], *mine;
    weft_peer *peer;
    void *foreign = allocate_by_the_driver();
    OK(weft_memory_allocate(owner, BYTES, &device, &theirs[0]));
    OK(weft_memory_register(owner, foreign, BYTES, &device, &theirs[1]));
    CHECK(weft_memory_address(theirs[0]) && weft_memory_address(theirs[1]) == foreign);
    OK(weft_publish(owner, "allocated", theirs[0], WEFT_ACCESS_READ_WRITE));
    OK(weft_publish(owner, "registered", theirs[1], WEFT_ACCESS_READ_WRITE));
    OK(weft_memory_allocate(reader, BYTES, NULL, &mine));
    OK(weft_connect(reader, weft_agent_address(owner), LONG, &peer));
    const char *names[] = {"allocated", "registered"};
    unsigned char *bytes = weft_memory_address(mine);
    for (int kind = 0; kind < 2; kind++) {
        weft_region *region;
        weft_transfer *transfer;
        OK(weft_peer_region(peer, names[kind], LONG, &region));
        weft_leg all = {sizeof all, mine, region, NULL, 0, NULL, 0};
        weft_transfer_options options = {.size = sizeof options, .deadline_ns = LONG, .checksum = WEFT_ON};
        for (size_t at = 0; at < BYTES; at++) bytes[at] = (unsigned char)(at * 11 + kind);
        OK(weft_write(peer, &all, 1, &options, &transfer));
        OK(weft_transfer_wait(transfer, WEFT_FOREVER, NULL));
        weft_transfer_free(transfer);
        memset(bytes, 0, BYTES);
        OK(weft_read(peer, &all, 1, &options, &transfer));
        OK(weft_transfer_wait(transfer, WEFT_FOREVER, NULL));
        weft_transfer_free(transfer), weft_region_free(region);
        for (size_t at = 0; at < BYTES; at++) CHECK(bytes[at] == (unsigned char)(at * 11 + kind));
    }
    weft_memory *nothing;
    IS(WEFT_ERROR_GPU, weft_memory_register(owner, bytes, BYTES, &device, &nothing));
    OK(weft_memory_deregister(theirs[0], LONG));
    OK(weft_memory_deregister(theirs[1], LONG));
    weft_memory_free(mine), weft_peer_free(peer), weft_agent_free(reader), weft_agent_free(owner);
    say("done");
    return 0;
}
