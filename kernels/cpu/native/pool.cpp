#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <time.h>

#include <atomic>

namespace pool {
namespace {

constexpr int MAX_WORKERS = 255;
constexpr int SPINS_PER_LOOK = 64;
constexpr int64_t SPIN_NS = 200000;  // longer than the gap between two kernels of a step, shorter than an idle moment

struct Job {
    void (*body)(void *, int64_t);
    void *context;
    int64_t count;
    int workers;
};

Job job;
std::atomic<uint64_t> epoch{0};
std::atomic<int64_t> next_piece{0};
std::atomic<bool> open{false};
std::atomic<int> inside{0}, sleepers{0};
std::atomic_flag busy = ATOMIC_FLAG_INIT;
int started = 0;
pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t wake = PTHREAD_COND_INITIALIZER;

inline void pause_cpu() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

void take_pieces() {
    for (;;) {
        int64_t piece = next_piece.fetch_add(1);
        if (piece >= job.count) return;
        job.body(job.context, piece);
    }
}

// Spins, then sleeps, until the epoch is no longer `seen`.
uint64_t await_epoch(uint64_t seen) {
    int64_t until = now_ns() + SPIN_NS;
    do {
        for (int i = 0; i < SPINS_PER_LOOK; i++) {
            uint64_t e = epoch.load();
            if (e != seen) return e;
            pause_cpu();
        }
    } while (now_ns() < until);
    pthread_mutex_lock(&mutex);
    sleepers++;
    while (epoch.load() == seen) pthread_cond_wait(&wake, &mutex);
    sleepers--;
    pthread_mutex_unlock(&mutex);
    return epoch.load();
}

void *work(void *argument) {
    int index = (int)(intptr_t)argument;
    uint64_t seen = 0;
    for (;;) {
        seen = await_epoch(seen);
        inside++;  // announced before looking whether the job is open; the caller closes it before it looks who is inside
        if (open.load() && index < job.workers) take_pieces();
        inside--;
    }
}

void start_workers(int wanted) {
    for (; started < wanted && started < MAX_WORKERS; started++) {
        pthread_t thread;
        if (pthread_create(&thread, nullptr, work, (void *)(intptr_t)started)) return;  // fewer helpers, same result
        pthread_detach(thread);
    }
}

void after_fork() {  // the child has no workers and starts its own
    started = 0;
    inside = 0;
    sleepers = 0;
    open = false;
    busy.clear();
    pthread_mutex_init(&mutex, nullptr);
    pthread_cond_init(&wake, nullptr);
}

__attribute__((constructor)) void watch_forks() { pthread_atfork(nullptr, nullptr, after_fork); }

}  // namespace

void run(int64_t count, int threads, void (*body)(void *, int64_t), void *context) {
    if (threads <= 1 || count <= 1 || busy.test_and_set()) {
        for (int64_t i = 0; i < count; i++) body(context, i);
        return;
    }
    start_workers(threads - 1);
    job = {body, context, count, threads - 1};
    next_piece = 0;
    open = true;
    epoch++;
    if (sleepers.load()) {
        pthread_mutex_lock(&mutex);
        pthread_cond_broadcast(&wake);
        pthread_mutex_unlock(&mutex);
    }
    take_pieces();
    open = false;
    for (int spins = 0; inside.load(); spins++) {
        pause_cpu();
        if (spins > 2000) sched_yield();  // a worker holds the last piece and was descheduled: let it run
    }
    busy.clear();
}

}  // namespace pool
