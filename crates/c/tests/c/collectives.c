/* One rank of a group that a launcher has started: every collective, waited for and started, beside what it should come to. */
#include "check.h"

enum { COUNT = 3000, RANKS_MAX = 8 };

static int32_t given(uint32_t rank, size_t at) { return (int32_t)(rank * 1000 + at % 97); }

static weft_communicator *group;
static uint32_t rank, ranks;
static int32_t input[COUNT * RANKS_MAX], output[COUNT * RANKS_MAX];

static void prepare(void) {
    for (size_t at = 0; at < COUNT * ranks; at++) input[at] = given(rank, at), output[at] = -1;
}

static int32_t sum(size_t at) {
    int32_t total = 0;
    for (uint32_t other = 0; other < ranks; other++) total += given(other, at);
    return total;
}

/* `started` calls are waited for later. */
static void all(int started) {
    weft_call *call = NULL, **place = started ? &call : NULL;
    weft_call_options options = {.size = sizeof options, .deadline_ns = LONG, .deterministic = started, .all_or_nothing = !started};
#define RUN(made)                                                                                                                \
    do {                                                                                                                         \
        prepare();                                                                                                               \
        OK(made);                                                                                                                \
        if (started) {                                                                                                           \
            weft_status status = weft_call_poll(call);                                                                           \
            CHECK(status == WEFT_OK || status == WEFT_PENDING);                                                                  \
            OK(weft_call_wait(call, WEFT_FOREVER));                                                                              \
            weft_call_free(call);                                                                                                \
        }                                                                                                                        \
    } while (0)
    uint32_t root = ranks - 1;
    RUN(weft_barrier(group, &options, place));
    RUN(weft_broadcast(group, input, COUNT, WEFT_I32, root, &options, place));
    for (size_t at = 0; at < COUNT; at++) CHECK(input[at] == given(root, at));
    RUN(weft_all_reduce(group, input, output, COUNT, WEFT_I32, WEFT_SUM, &options, place));
    for (size_t at = 0; at < COUNT; at++) CHECK(output[at] == sum(at));
    RUN(weft_all_reduce(group, input, input, COUNT, WEFT_I32, WEFT_MAX, &options, place));
    for (size_t at = 0; at < COUNT; at++) CHECK(input[at] == given(ranks - 1, at));
    RUN(weft_reduce(group, input, rank == root ? output : NULL, COUNT, WEFT_I32, WEFT_SUM, root, &options, place));
    for (size_t at = 0; at < COUNT; at++) CHECK(output[at] == (rank == root ? sum(at) : -1));
    RUN(weft_all_gather(group, input, output, COUNT, WEFT_I32, &options, place));
    for (size_t at = 0; at < COUNT * ranks; at++) CHECK(output[at] == given((uint32_t)(at / COUNT), at % COUNT));
    RUN(weft_gather(group, input, rank == root ? output : NULL, COUNT, WEFT_I32, root, &options, place));
    for (size_t at = 0; at < COUNT * ranks; at++)
        CHECK(output[at] == (rank == root ? given((uint32_t)(at / COUNT), at % COUNT) : -1));
    RUN(weft_scatter(group, rank == root ? input : NULL, output, COUNT, WEFT_I32, root, &options, place));
    for (size_t at = 0; at < COUNT; at++) CHECK(output[at] == given(root, rank * COUNT + at));
    RUN(weft_reduce_scatter(group, input, output, COUNT, WEFT_I32, WEFT_SUM, &options, place));
    for (size_t at = 0; at < COUNT; at++) CHECK(output[at] == sum(rank * COUNT + at));
    RUN(weft_all_to_all(group, input, output, COUNT, WEFT_I32, &options, place));
    for (size_t at = 0; at < COUNT * ranks; at++)
        CHECK(output[at] == given((uint32_t)(at / COUNT), rank * COUNT + at % COUNT));
    /* Round in a ring: what is sent goes while the other is received. */
    weft_call *sent;
    prepare();
    OK(weft_send(group, input, COUNT, WEFT_I32, (rank + 1) % ranks, NULL, &sent));
    OK(weft_receive(group, output, COUNT, WEFT_I32, (rank + ranks - 1) % ranks, NULL, NULL));
    OK(weft_call_wait(sent, LONG));
    weft_call_free(sent);
    for (size_t at = 0; at < COUNT; at++) CHECK(output[at] == given((rank + ranks - 1) % ranks, at));
    float numbers[4] = {1, 2, 3, (float)rank}, averages[4];
    options.algorithm = "ring";
    OK(weft_all_reduce(group, numbers, averages, 4, WEFT_F32, WEFT_AVG, &options, NULL));
    CHECK(averages[0] == 1 && averages[3] == (float)(ranks - 1) / 2);
}

int main(void) {
    OK(weft_communicator_from_env(WEFT_ABI_VERSION, "world", &group));
    rank = weft_communicator_rank(group), ranks = weft_communicator_size(group);
    CHECK(ranks >= 2 && ranks <= RANKS_MAX && rank < ranks);
    all(0);
    all(1);
    weft_communicator_free(group);
    say("done");
    return 0;
}
