// One pool of threads for all kernels.
//
// Work is taken piece by piece, by the caller too, and the caller waits only for threads that hold a piece: a thread that the
// system runs late (two cores, and an HTTP process on one of them) costs nothing but its help. An OpenMP barrier waits for all.
#pragma once

#include <cstdint>

namespace pool {

// Calls body(context, piece) for every piece in [0, count), on up to `threads` threads, this one included. Returns when all
// are done. Pieces must not depend on each other. A second caller at the same time does its work alone.
void run(int64_t count, int threads, void (*body)(void *context, int64_t piece), void *context);

template <class Body>
inline void parallel_for(int64_t count, int threads, const Body &body) {
    run(count, threads, [](void *context, int64_t piece) { (*(const Body *)context)(piece); }, (void *)&body);
}

}  // namespace pool
