/* Arguments that cannot be right, to every function: none of them crashes, and all are told. */
#include "check.h"

#define INVALID(call) IS(WEFT_ERROR_INVALID_ARGUMENT, call)
/* Neither null nor aligned, and never looked at. */
#define ODD(type) ((type *)(uintptr_t)4097)

static void nothing_at_all(void) {
    weft_agent *agent = ODD(weft_agent);
    const void *bytes;
    size_t length;
    int fd;
    uint64_t word;
    INVALID(weft_agent_start(WEFT_ABI_VERSION, "a", NULL, 0, NULL));
    INVALID(weft_agent_start(WEFT_ABI_VERSION, "a", NULL, 1, &agent));
    CHECK(agent == NULL);
    const char *settings[] = {"deadline"};
    INVALID(weft_agent_start(WEFT_ABI_VERSION, "a", settings, 1, &agent));
    settings[0] = NULL;
    INVALID(weft_agent_start(WEFT_ABI_VERSION, "a", settings, 1, &agent));
    INVALID(weft_agent_start(WEFT_ABI_VERSION, "\xff", NULL, 0, &agent));
    INVALID(weft_agent_metadata(NULL, &bytes, &length));
    INVALID(weft_agent_event_fd(NULL, &fd));
    INVALID(weft_agent_close(NULL));
    INVALID(weft_agent_notification(NULL, 0, NULL));
    INVALID(weft_memory_register(NULL, &fd, 4, NULL, NULL));
    INVALID(weft_memory_allocate(NULL, 4, NULL, NULL));
    INVALID(weft_memory_deregister(NULL, 0));
    INVALID(weft_publish(NULL, "a", NULL, WEFT_ACCESS_READ));
    INVALID(weft_withdraw(NULL, "a"));
    INVALID(weft_connect(NULL, "a", 0, NULL));
    INVALID(weft_connect_metadata(NULL, "a", 1, 0, NULL));
    INVALID(weft_connect_named(NULL, "a", 0, NULL));
    INVALID(weft_peer_region(NULL, "a", 0, NULL));
    INVALID(weft_peer_notify(NULL, "a", 1));
    INVALID(weft_peer_disconnect(NULL));
    INVALID(weft_read(NULL, NULL, 0, NULL, NULL));
    INVALID(weft_write(NULL, NULL, 0, NULL, NULL));
    INVALID(weft_prepare(NULL, WEFT_READ, NULL, 0, NULL, NULL));
    INVALID(weft_prepared_post(NULL, NULL));
    INVALID(weft_transfer_poll(NULL, NULL));
    INVALID(weft_transfer_wait(NULL, 0, NULL));
    INVALID(weft_transfer_cancel(NULL));
    INVALID(weft_fetch_add(NULL, NULL, 0, 1, 0, &word));
    INVALID(weft_compare_swap(NULL, NULL, 0, 1, 2, 0, &word));
    INVALID(weft_notification_payload(NULL, &bytes, &length));
    INVALID(weft_notification_peer(NULL, NULL));
    INVALID(weft_last_error_details(NULL));
    INVALID(weft_communicator_from_env(WEFT_ABI_VERSION, NULL, NULL));
    INVALID(weft_communicator_join(NULL, NULL, NULL));
    INVALID(weft_communicator_shrink(NULL, 0, NULL));
    INVALID(weft_barrier(NULL, NULL, NULL));
    INVALID(weft_broadcast(NULL, NULL, 1, WEFT_F32, 0, NULL, NULL));
    INVALID(weft_all_reduce(NULL, NULL, NULL, 1, WEFT_F32, WEFT_SUM, NULL, NULL));
    INVALID(weft_reduce(NULL, NULL, NULL, 1, WEFT_F32, WEFT_SUM, 0, NULL, NULL));
    INVALID(weft_all_gather(NULL, NULL, NULL, 1, WEFT_F32, NULL, NULL));
    INVALID(weft_gather(NULL, NULL, NULL, 1, WEFT_F32, 0, NULL, NULL));
    INVALID(weft_scatter(NULL, NULL, NULL, 1, WEFT_F32, 0, NULL, NULL));
    INVALID(weft_reduce_scatter(NULL, NULL, NULL, 1, WEFT_F32, WEFT_SUM, NULL, NULL));
    INVALID(weft_all_to_all(NULL, NULL, NULL, 1, WEFT_F32, NULL, NULL));
    INVALID(weft_send(NULL, NULL, 1, WEFT_F32, 0, NULL, NULL));
    INVALID(weft_receive(NULL, NULL, 1, WEFT_F32, 0, NULL, NULL));
    INVALID(weft_call_poll(NULL));
    INVALID(weft_call_wait(NULL, 0));
    INVALID(weft_agent_close(ODD(weft_agent)));
    CHECK(strstr(weft_last_error(), "aligned"));
    CHECK(!weft_agent_name(NULL) && !weft_agent_address(ODD(weft_agent)) && !weft_peer_name(NULL));
    CHECK(!weft_memory_address(NULL) && !weft_memory_length(NULL) && !weft_region_length(NULL));
    CHECK(!weft_peer_is_connected(NULL) && weft_communicator_rank(NULL) == UINT32_MAX && !weft_communicator_size(NULL));
    weft_agent_free(NULL), weft_memory_free(NULL), weft_peer_free(NULL), weft_region_free(NULL), weft_transfer_free(NULL);
    weft_prepared_free(NULL), weft_notification_free(NULL), weft_communicator_free(NULL), weft_call_free(NULL);
    weft_agent_free(ODD(weft_agent));
    CHECK(strcmp(weft_status_name((weft_status)-12345), "an unknown status") == 0);
}

static void memory(weft_agent *agent) {
    weft_memory *memory;
    char bytes[64];
    weft_memory_options options = {.size = sizeof options};
    INVALID(weft_memory_register(agent, NULL, 4, NULL, &memory));
    INVALID(weft_memory_register(agent, bytes, SIZE_MAX, NULL, &memory));
    INVALID(weft_memory_register(agent, (void *)UINTPTR_MAX, 4, NULL, &memory));
    INVALID(weft_memory_register(agent, bytes, 64, NULL, NULL));
    INVALID(weft_memory_register(agent, bytes, 64, ODD(weft_memory_options), &memory));
    options.size = 8;
    INVALID(weft_memory_allocate(agent, 64, &options, &memory));
    CHECK(strstr(weft_last_error(), "sizeof"));
    options.size = sizeof options;
    options.place = (weft_place)17;
    INVALID(weft_memory_allocate(agent, 64, &options, &memory));
    options.place = WEFT_PLACE_GPU;
    options.device = 70000;
    INVALID(weft_memory_allocate(agent, 64, &options, &memory));
    /* From a later version, and asking for something. */
    struct {
        weft_memory_options known;
        uint64_t unknown;
    } later = {{.size = sizeof later}, 1};
    INVALID(weft_memory_allocate(agent, 64, &later.known, &memory));
    later.unknown = 0;
    OK(weft_memory_allocate(agent, 64, &later.known, &memory));
    INVALID(weft_publish(agent, "x", memory, (weft_access)0));
    INVALID(weft_publish(agent, NULL, memory, WEFT_ACCESS_READ));
    INVALID(weft_publish(agent, "x", NULL, WEFT_ACCESS_READ));
    INVALID(weft_publish(agent, "", memory, WEFT_ACCESS_READ));
    /* The handle of something else. */
    INVALID(weft_publish((weft_agent *)memory, "x", memory, WEFT_ACCESS_READ));
    INVALID(weft_agent_close((weft_agent *)memory));
    CHECK(strstr(weft_last_error(), "not the handle of a"));
    weft_memory_free(memory);
}

static void transfers(weft_agent *agent, weft_agent *other, weft_peer *peer, weft_region *region) {
    weft_memory *mine, *others;
    weft_transfer *transfer;
    weft_prepared *prepared;
    weft_summary summary = {.size = 8};
    uint64_t word;
    OK(weft_memory_allocate(agent, 4096, NULL, &mine));
    OK(weft_memory_allocate(other, 4096, NULL, &others));
    weft_span all = {0, 4096}, half = {0, 2048}, outside = {4000, 200}, around = {UINT64_MAX, 2}, huge = {0, UINT64_MAX};
    weft_leg leg = {sizeof leg, mine, region, &all, 1, &all, 1};
    INVALID(weft_read(peer, NULL, 1, NULL, &transfer));
    INVALID(weft_read(peer, &leg, 0, NULL, &transfer));
    INVALID(weft_read(peer, &leg, SIZE_MAX, NULL, &transfer));
    INVALID(weft_read(peer, &leg, 1, NULL, NULL));
    INVALID(weft_prepare(peer, (weft_direction)2, &leg, 1, NULL, &prepared));
#define WITH(field, value)                                                                                                       \
    do {                                                                                                                         \
        weft_leg changed = leg;                                                                                                  \
        changed.field = value;                                                                                                   \
        transfer = ODD(weft_transfer);                                                                                           \
        INVALID(weft_read(peer, &changed, 1, NULL, &transfer));                                                                  \
        CHECK(transfer == NULL);                                                                                                 \
    } while (0)
    WITH(size, 0);
    WITH(size, 57);
    WITH(local, NULL);
    WITH(local, others);
    WITH(remote, NULL);
    WITH(remote, (weft_region *)mine);
    WITH(local_spans, NULL);
    WITH(local_spans, &half);
    WITH(remote_spans, &outside);
    WITH(remote_spans, &around);
    WITH(local_spans, &huge);
    WITH(remote_count, SIZE_MAX / 4);
    WITH(remote_spans, ODD(weft_span));
    weft_leg legs[] = {leg, leg};
    legs[1].size = sizeof leg + 8;
    INVALID(weft_write(peer, legs, 2, NULL, &transfer));
    weft_transfer_options options = {.size = sizeof options, .checksum = (weft_switch)3};
    INVALID(weft_read(peer, &leg, 1, &options, &transfer));
    options.checksum = WEFT_ON;
    options.notification_length = 4;
    INVALID(weft_write(peer, &leg, 1, &options, &transfer));
    INVALID(weft_peer_notify(peer, NULL, 4));
    static char long_payload[1 << 20];
    INVALID(weft_peer_notify(peer, long_payload, sizeof long_payload));
    INVALID(weft_fetch_add(peer, region, 0, 1, 0, NULL));
    INVALID(weft_fetch_add(peer, NULL, 0, 1, 0, &word));
    OK(weft_read(peer, &leg, 1, NULL, &transfer));
    INVALID(weft_transfer_wait(transfer, WEFT_FOREVER, &summary));
    summary.size = sizeof summary;
    OK(weft_transfer_wait(transfer, WEFT_FOREVER, &summary));
    CHECK(summary.bytes == 4096);
    OK(weft_transfer_poll(transfer, NULL));
    weft_transfer_free(transfer), weft_memory_free(mine), weft_memory_free(others);
}

static void groups(weft_agent *agent) {
    weft_communicator *group;
    float numbers[8] = {1, 2, 3, 4}, sums[8];
    weft_join_options options = {.size = sizeof options, .name = "alone", .rank = 0, .rank_count = 1};
    OK(weft_communicator_join(agent, &options, &group));
    CHECK(weft_communicator_rank(group) == 0 && weft_communicator_size(group) == 1);
    weft_call_options call = {.size = sizeof call, .algorithm = "magic"};
    INVALID(weft_all_reduce(group, numbers, sums, 4, WEFT_F32, WEFT_SUM, &call, NULL));
    INVALID(weft_all_reduce(group, NULL, sums, 4, WEFT_F32, WEFT_SUM, NULL, NULL));
    INVALID(weft_all_reduce(group, (char *)numbers + 1, sums, 4, WEFT_F32, WEFT_SUM, NULL, NULL));
    INVALID(weft_all_reduce(group, numbers, numbers + 1, 4, WEFT_F32, WEFT_SUM, NULL, NULL));
    INVALID(weft_all_reduce(group, numbers, sums, SIZE_MAX, WEFT_F32, WEFT_SUM, NULL, NULL));
    INVALID(weft_all_reduce(group, numbers, sums, SIZE_MAX / 4, WEFT_F32, WEFT_SUM, NULL, NULL));
    INVALID(weft_all_reduce(group, numbers, sums, 4, (weft_datatype)99, WEFT_SUM, NULL, NULL));
    INVALID(weft_all_reduce(group, numbers, sums, 4, WEFT_F32, (weft_reduction)-1, NULL, NULL));
    INVALID(weft_broadcast(group, numbers, 4, WEFT_F32, 7, NULL, NULL));
    INVALID(weft_send(group, numbers, 4, WEFT_F32, 1, NULL, NULL));
    OK(weft_all_reduce(group, numbers, sums, 4, WEFT_F32, WEFT_SUM, NULL, NULL));
    CHECK(sums[3] == 4);
    OK(weft_barrier(group, NULL, NULL));
    weft_communicator_free(group);
    options.name = NULL;
    INVALID(weft_communicator_join(agent, &options, &group));
    options.name = "alone again", options.rank = 1;
    INVALID(weft_communicator_join(agent, &options, &group));
    CHECK(group == NULL);
}

int main(void) {
    weft_error details = {.size = sizeof details};
    IS(WEFT_NONE, weft_last_error_details(&details));
    CHECK(strcmp(weft_last_error(), "") == 0);
    CHECK(weft_abi_version() == WEFT_ABI_VERSION && strchr(weft_version(), '.'));
    nothing_at_all();
    weft_agent *agent = start("arguments", "rendezvous=process", NULL), *other = start("other", NULL, NULL);
    weft_memory *data;
    weft_peer *peer;
    weft_region *region;
    OK(weft_memory_allocate(other, 4096, NULL, &data));
    OK(weft_publish(other, "data", data, WEFT_ACCESS_READ_WRITE));
    INVALID(weft_connect(agent, NULL, SECOND, &peer));
    INVALID(weft_connect_metadata(agent, "no metadata", 11, SECOND, &peer));
    INVALID(weft_connect_metadata(agent, NULL, 11, SECOND, &peer));
    OK(weft_connect(agent, weft_agent_address(other), LONG, &peer));
    INVALID(weft_peer_region(peer, NULL, SECOND, &region));
    INVALID(weft_peer_region(peer, "data", SECOND, NULL));
    OK(weft_peer_region(peer, "data", LONG, &region));
    memory(agent);
    transfers(agent, other, peer, region);
    groups(agent);
    details.size = 8;
    INVALID(weft_last_error_details(&details));
    details.size = sizeof details;
    OK(weft_last_error_details(&details));
    CHECK(details.status == WEFT_ERROR_INVALID_ARGUMENT && details.rank == -1 && strcmp(details.text, weft_last_error()) == 0);
    weft_region_free(region), weft_peer_free(peer), weft_memory_free(data), weft_agent_free(agent), weft_agent_free(other);
    say("done");
    return 0;
}
