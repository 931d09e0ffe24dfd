/* What the test programs share: checks that say where they failed, and other processes of the same program. */
#ifndef CHECK_H
#define CHECK_H

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <weft.h>

/* Longer than anything takes that does not hang, also under valgrind. */
#define LONG (60 * SECOND)
#define SECOND UINT64_C(1000000000)
#define MILLISECOND UINT64_C(1000000)

#define CHECK(condition)                                                                                                         \
    do {                                                                                                                         \
        if (!(condition)) {                                                                                                      \
            fprintf(stderr, "%s:%d: not so: %s (last error: %s)\n", __FILE__, __LINE__, #condition, weft_last_error());          \
            exit(1);                                                                                                             \
        }                                                                                                                        \
    } while (0)

/* Fails unless a call returns what is expected of it; also for what it returns. */
#define IS(expected, call) is(expected, call, #call, __FILE__, __LINE__)
#define OK(call) IS(WEFT_OK, call)

static inline weft_status is(weft_status expected, weft_status found, const char *call, const char *file, int line) {
    if (found != expected) {
        fprintf(stderr, "%s:%d: %s is %s, not %s: %s\n", file, line, call, weft_status_name(found), weft_status_name(expected),
                weft_last_error());
        exit(1);
    }
    return found;
}

static inline uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * SECOND + (uint64_t)now.tv_nsec;
}

static inline void nap(uint64_t nanoseconds) {
    struct timespec time = {(time_t)(nanoseconds / SECOND), (long)(nanoseconds % SECOND)};
    nanosleep(&time, NULL);
}

/* Another process of this program, which plays a part and has said one line. It ends with the first at the latest. */
typedef struct child {
    pid_t pid;
    int to;
    char line[512];
} child;

static inline child spawn(const char *program, const char *part, const char *first, const char *second) {
    int to[2], from[2];
    child it = {0};
    CHECK(pipe(to) == 0 && pipe(from) == 0);
    it.pid = fork();
    CHECK(it.pid >= 0);
    if (it.pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(to[0], 0);
        dup2(from[1], 1);
        close(to[0]), close(to[1]), close(from[0]), close(from[1]);
        execl(program, program, part, first, second, (char *)NULL);
        _exit(127);
    }
    close(to[0]), close(from[1]);
    it.to = to[1];
    FILE *said = fdopen(from[0], "r");
    CHECK(said && fgets(it.line, sizeof it.line, said));
    it.line[strcspn(it.line, "\n")] = 0;
    fclose(said);
    return it;
}

/* Comes back when it is frozen: until then it may still answer. */
static inline void freeze(const child *it) {
    int status;
    kill(it->pid, SIGSTOP);
    CHECK(waitpid(it->pid, &status, WUNTRACED) == it->pid && WIFSTOPPED(status));
}

static inline void thaw(const child *it) { kill(it->pid, SIGCONT); }

static inline void end(child *it) {
    kill(it->pid, SIGKILL);
    waitpid(it->pid, NULL, 0);
    close(it->to);
}

static inline void say(const char *line) {
    printf("%s\n", line);
    fflush(stdout);
}

/* Until the first process has gone, or has closed the way to this one. */
static inline void wait_for_the_end(void) {
    char byte;
    while (read(0, &byte, 1) > 0 || errno == EINTR) errno = 0;
}

static inline weft_agent *start(const char *name, const char *first, const char *second) {
    const char *settings[] = {first, second};
    weft_agent *agent = NULL;
    OK(weft_agent_start(WEFT_ABI_VERSION, name, settings, first ? (second ? 2 : 1) : 0, &agent));
    return agent;
}

/* The part of an owner: `data` may be read and written, `fixed` only read. */
enum { DATA = 4 << 20 };

static inline int play_owner(const char *setting) {
    weft_agent *agent = start("owner", setting, NULL);
    weft_memory *data, *fixed;
    OK(weft_memory_allocate(agent, DATA, NULL, &data));
    OK(weft_memory_allocate(agent, 4096, NULL, &fixed));
    unsigned char *bytes = weft_memory_address(data);
    for (int at = 4096; at < DATA; at++) bytes[at] = (unsigned char)(at * 7 + at / 4096);
    OK(weft_publish(agent, "data", data, WEFT_ACCESS_READ_WRITE));
    OK(weft_publish(agent, "fixed", fixed, WEFT_ACCESS_READ));
    say(weft_agent_address(agent));
    wait_for_the_end();
    return 0;
}

#endif
