// A pool of threads for one loop at a time: made when first used, and made anew after a fork.
#pragma once

namespace rvdcomm {

/// Run `task(context, i)` for every i in [0, num_tasks), one of them on the calling thread.
///
/// Returns when all are done. While another caller's loop has the pool, the tasks run here one
/// after another. Allocates only when the pool has to grow.
/// @pre task throws nothing
void parallel_for(int num_tasks, void (*task)(const void* context, int i), const void* context);

}  // namespace rvdcomm
