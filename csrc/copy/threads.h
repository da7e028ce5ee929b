// A pool of threads that runs one loop at a time. It is made at its first use; a forked child makes
// its own.
#pragma once

namespace rvdcomm {

/// Run `task(context, i)` for every i in [0, num_tasks), one of them on the calling thread.
///
/// Returns when all are done. While the pool runs the loop of another caller, the calling thread
/// runs all tasks, one after another. Allocates memory only if the pool has to grow.
/// @pre task throws nothing
void parallel_for(int num_tasks, void (*task)(const void* context, int i), const void* context);

}  // namespace rvdcomm
