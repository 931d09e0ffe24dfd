/* A process with all kinds of handles forks: the child is told, may give them back, and does the parent no harm. */
#include "check.h"

#define FORKED(call) IS(WEFT_ERROR_FORKED, call)

int main(int count, char **arguments) {
    if (count > 1) return play_owner(count > 2 ? arguments[2] : NULL);
    child owner = spawn(arguments[0], "owner", NULL, NULL);
    weft_agent *agent = start("parent", "rendezvous=process", NULL), *other = start("other", NULL, NULL);
    weft_peer *peer, *made;
    weft_region *data, *found;
    weft_memory *memory, *more;
    weft_transfer *transfer, *posted;
    weft_prepared *prepared;
    weft_notification *told, *nothing;
    weft_communicator *group, *left;
    weft_call *call;
    const void *bytes;
    size_t length;
    uint64_t word;
    int fd;
    OK(weft_connect(agent, owner.line, LONG, &peer));
    OK(weft_peer_region(peer, "data", LONG, &data));
    OK(weft_memory_allocate(agent, DATA, NULL, &memory));
    OK(weft_publish(agent, "own", memory, WEFT_ACCESS_READ));
    OK(weft_agent_event_fd(agent, &fd));
    weft_leg all = {sizeof all, memory, data, NULL, 0, NULL, 0};
    OK(weft_prepare(peer, WEFT_READ, &all, 1, NULL, &prepared));
    OK(weft_prepared_post(prepared, &transfer));
    weft_peer *to_parent;
    OK(weft_connect(other, weft_agent_address(agent), LONG, &to_parent));
    OK(weft_peer_notify(to_parent, "before", 6));
    OK(weft_agent_notification(agent, LONG, &told));
    weft_join_options options = {.size = sizeof options, .name = "alone", .rank = 0, .rank_count = 1};
    OK(weft_communicator_join(agent, &options, &group));
    OK(weft_barrier(group, NULL, &call));
    OK(weft_transfer_wait(transfer, WEFT_FOREVER, NULL));

    for (int gives_back = 0; gives_back < 2; gives_back++) {
        fflush(stdout);
        pid_t forked = fork();
        CHECK(forked >= 0);
        if (forked == 0) {
            alarm(120);
            FORKED(weft_agent_metadata(agent, &bytes, &length));
            FORKED(weft_agent_event_fd(agent, &fd));
            FORKED(weft_agent_close(agent));
            FORKED(weft_memory_allocate(agent, 64, NULL, &more));
            FORKED(weft_memory_register(agent, &all, sizeof all, NULL, &more));
            FORKED(weft_publish(agent, "more", memory, WEFT_ACCESS_READ));
            FORKED(weft_withdraw(agent, "own"));
            FORKED(weft_connect(agent, owner.line, SECOND, &made));
            FORKED(weft_agent_notification(agent, SECOND, &nothing));
            FORKED(weft_peer_region(peer, "data", SECOND, &found));
            FORKED(weft_peer_notify(peer, "x", 1));
            FORKED(weft_peer_disconnect(peer));
            FORKED(weft_read(peer, &all, 1, NULL, &posted));
            FORKED(weft_prepared_post(prepared, &posted));
            FORKED(weft_transfer_poll(transfer, NULL));
            FORKED(weft_transfer_wait(transfer, WEFT_FOREVER, NULL));
            FORKED(weft_transfer_cancel(transfer));
            FORKED(weft_fetch_add(peer, data, 0, 1, 0, &word));
            FORKED(weft_notification_peer(told, &made));
            FORKED(weft_barrier(group, NULL, NULL));
            FORKED(weft_communicator_shrink(group, SECOND, &left));
            FORKED(weft_call_wait(call, WEFT_FOREVER));
            FORKED(weft_memory_deregister(memory, SECOND));
            CHECK(!weft_peer_is_connected(peer));
            /* The bytes of memory that Weft allocated are shared. */
            ((char *)weft_memory_address(memory))[gives_back] = 'c';
            /* A child has agents of its own, if it wants some. */
            weft_agent *own = start("child", NULL, NULL);
            weft_peer *theirs;
            weft_region *region;
            OK(weft_connect(own, owner.line, LONG, &theirs));
            OK(weft_peer_region(theirs, "data", LONG, &region));
            weft_region_free(region), weft_peer_free(theirs), weft_agent_free(own);
            if (gives_back) {
                weft_call_free(call), weft_communicator_free(group), weft_notification_free(told), weft_transfer_free(transfer);
                weft_prepared_free(prepared), weft_memory_free(memory), weft_region_free(data), weft_peer_free(peer);
                weft_peer_free(to_parent), weft_agent_free(agent), weft_agent_free(other);
            }
            _exit(0);
        }
        int status;
        CHECK(waitpid(forked, &status, 0) == forked && WIFEXITED(status) && WEXITSTATUS(status) == 0);
        CHECK(((char *)weft_memory_address(memory))[gives_back] == 'c');
        /* The parent notices nothing. */
        OK(weft_call_wait(call, WEFT_FOREVER));
        OK(weft_prepared_post(prepared, &posted));
        OK(weft_transfer_wait(posted, WEFT_FOREVER, NULL));
        weft_transfer_free(posted);
        OK(weft_peer_notify(to_parent, "after", 5));
        weft_notification *later;
        OK(weft_agent_notification(agent, LONG, &later));
        weft_notification_free(later);
        OK(weft_barrier(group, NULL, NULL));
        OK(weft_peer_region(to_parent, "own", LONG, &found));
        weft_region_free(found);
    }
    weft_call_free(call), weft_communicator_free(group), weft_notification_free(told), weft_transfer_free(transfer);
    weft_prepared_free(prepared), weft_memory_free(memory), weft_region_free(data), weft_peer_free(peer);
    weft_peer_free(to_parent), weft_agent_free(agent), weft_agent_free(other);
    end(&owner);
    say("done");
    return 0;
}
