/*
 * Times collectives of an MPI, one JSON object a line, with the fields that `weft bench collective --json` prints.
 *
 *   mpi_collective NAME OPS SIZES SECONDS REPEATS
 *
 * OPS and SIZES are lists with commas. A size is that of the larger of a rank's buffers. SECONDS are for all repeats of a
 * point together. A repeat takes as long as its slowest rank; percentiles are those of rank 0.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

enum { PERIOD = 7, TRIALS = 5, REPEATS_MAX = 100, CALLS_MIN = 3, CALLS_MAX = 1 << 20 };

typedef struct {
    const char *name;
    /* Elements of input and output, as shares of the ranks or whole. */
    int whole_input, whole_output;
    void (*call)(void);
    /* How much of the size each rank's link carries. */
    double (*bus)(double ranks);
} Collective;

static int own, ranks;
static float *input, *output;
static size_t share, whole;

static void all_reduce(void) { MPI_Allreduce(input, output, (int)whole, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); }
static void all_gather(void) {
    MPI_Allgather(input, (int)share, MPI_FLOAT, output, (int)share, MPI_FLOAT, MPI_COMM_WORLD);
}
static void reduce_scatter(void) {
    MPI_Reduce_scatter_block(input, output, (int)share, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}
static void all_to_all(void) {
    MPI_Alltoall(input, (int)share, MPI_FLOAT, output, (int)share, MPI_FLOAT, MPI_COMM_WORLD);
}
static void broadcast(void) { MPI_Bcast(output, (int)whole, MPI_FLOAT, 0, MPI_COMM_WORLD); }
static void barrier(void) { MPI_Barrier(MPI_COMM_WORLD); }

static double twice_the_others(double n) { return 2 * (n - 1) / n; }
static double the_others(double n) { return (n - 1) / n; }
static double all(double n) { return n > 0; }

static const Collective collectives[] = {
    {"allreduce", 1, 1, all_reduce, twice_the_others}, {"allgather", 0, 1, all_gather, the_others},
    {"reduce_scatter", 1, 0, reduce_scatter, the_others}, {"alltoall", 1, 1, all_to_all, the_others},
    {"broadcast", 1, 1, broadcast, all},               {"barrier", 0, 0, barrier, all},
};

/* What a rank contributes at a place. */
static float term(int rank, size_t at) { return (float)(rank + 1) + (float)(at % PERIOD); }

static float sum(size_t at) {
    float total = 0;
    for (int rank = 0; rank < ranks; rank++) total += term(rank, at);
    return total;
}

static float expected(const Collective *collective, size_t at) {
    if (collective->call == all_reduce) return sum(at);
    if (collective->call == reduce_scatter) return sum((size_t)own * share + at);
    if (collective->call == all_gather) return term((int)(at / share), at % share);
    if (collective->call == all_to_all) return term((int)(at / share), (size_t)own * share + at % share);
    return term(0, at);
}

static int is_correct(const Collective *collective) {
    size_t count = collective->whole_output ? whole : share;
    int correct = 1;
    if (collective->call != barrier)
        for (size_t at = 0; at < count; at++) correct &= output[at] == expected(collective, at);
    MPI_Allreduce(MPI_IN_PLACE, &correct, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    return correct;
}

static double cpu_seconds(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           1e-6 * (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

static int ascending(const void *a, const void *b) {
    double left = *(const double *)a, right = *(const double *)b;
    return (left > right) - (left < right);
}

/* The largest of the ranks' values, on all of them. */
static double largest(double value) {
    MPI_Allreduce(MPI_IN_PLACE, &value, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return value;
}

static void *memory(size_t bytes) {
    void *at = NULL;
    if (posix_memalign(&at, 4096, bytes + 4096)) MPI_Abort(MPI_COMM_WORLD, 3);
    return at;
}

static void measure(const char *name, const Collective *collective, size_t bytes, double seconds, int repeats) {
    share = bytes / sizeof(float) / (size_t)ranks;
    whole = share * (size_t)ranks;
    input = memory(whole * sizeof(float));
    output = memory(whole * sizeof(float));
    for (size_t at = 0; at < whole; at++) {
        input[at] = term(own, at);
        output[at] = collective->call == broadcast && own == 0 ? term(0, at) : 0;
    }
    collective->call();
    int correct = is_correct(collective);

    double least = 1e9;
    for (int trial = 0; trial < TRIALS; trial++) {
        barrier();
        double start = MPI_Wtime();
        collective->call();
        double took = MPI_Wtime() - start;
        if (took < least) least = took;
    }
    double fitting = seconds / repeats / (largest(least) + 1e-9);
    int calls = fitting < CALLS_MIN ? CALLS_MIN : fitting > CALLS_MAX / repeats ? CALLS_MAX / repeats : (int)fitting;
    MPI_Bcast(&calls, 1, MPI_INT, 0, MPI_COMM_WORLD);

    double *times = memory(sizeof(double) * (size_t)calls * (size_t)repeats);
    double means[REPEATS_MAX], sorted[REPEATS_MAX];
    double cpu = cpu_seconds(), begin = MPI_Wtime();
    for (int repeat = 0; repeat < repeats; repeat++) {
        barrier();
        double start = MPI_Wtime(), last = start;
        for (int call = 0; call < calls; call++) {
            collective->call();
            double now = MPI_Wtime();
            times[repeat * calls + call] = now - last;
            last = now;
        }
        means[repeat] = sorted[repeat] = largest((last - start) / calls);
    }
    double wall = MPI_Wtime() - begin;
    cpu = cpu_seconds() - cpu;
    MPI_Allreduce(MPI_IN_PLACE, &cpu, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);

    if (own == 0) {
        size_t count = (size_t)calls * (size_t)repeats;
        qsort(times, count, sizeof(double), ascending);
        qsort(sorted, (size_t)repeats, sizeof(double), ascending);
        double median = sorted[repeats / 2], rate = (double)bytes / median / 1e9;
        printf("{\"bench\":\"coll\",\"impl\":\"%s\",\"op\":\"%s\",\"dtype\":\"f32\",\"bytes\":%zu,\"ranks\":%d,\"iters\":%d,", name,
               collective->name, bytes, ranks, calls);
        printf("\"us_med\":%.3f,\"us_min\":%.3f,\"us_runs\":[", median * 1e6, sorted[0] * 1e6);
        for (int repeat = 0; repeat < repeats; repeat++) printf("%s%.3f", repeat ? "," : "", means[repeat] * 1e6);
        printf("],\"p50_us\":%.3f,\"p99_us\":%.3f,", times[count / 2] * 1e6, times[count * 99 / 100] * 1e6);
        printf("\"algbw_GBps\":%.4f,\"busbw_GBps\":%.4f,", rate, rate * collective->bus(ranks));
        printf("\"ok\":%s,\"cpu_cores\":%.2f}\n", correct ? "true" : "false", cpu / wall);
        fflush(stdout);
    }
    free(times);
    free(input);
    free(output);
}

/* Whether a list with commas contains a word. */
static int lists(const char *list, const char *word) {
    size_t len = strlen(word);
    for (const char *at = list; (at = strstr(at, word)); at += len)
        if ((at == list || at[-1] == ',') && (at[len] == ',' || at[len] == 0)) return 1;
    return 0;
}

int main(int count, char **words) {
    MPI_Init(&count, &words);
    MPI_Comm_rank(MPI_COMM_WORLD, &own);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (count != 6) {
        if (own == 0) fprintf(stderr, "usage: %s NAME OPS SIZES SECONDS REPEATS\n", words[0]);
        MPI_Finalize();
        return 2;
    }
    int repeats = atoi(words[5]);
    if (repeats < 1 || repeats > REPEATS_MAX) repeats = 1;
    for (size_t nth = 0; nth < sizeof collectives / sizeof *collectives; nth++) {
        if (!lists(words[2], collectives[nth].name)) continue;
        for (char *at = words[3]; *at;) {
            char *end;
            size_t bytes = strtoull(at, &end, 10);
            if (end == at) break;
            int empty = collectives[nth].call == barrier;
            measure(words[1], &collectives[nth], empty ? 0 : bytes, atof(words[4]), repeats);
            if (empty) break;
            at = *end ? end + 1 : end;
        }
    }
    MPI_Finalize();
    return 0;
}
