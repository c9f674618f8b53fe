// Runs kernels on the emulated device of emulated_device.hpp. The file "kernels.inc" is generated.
#include "emulated_device.hpp"

namespace emulated {

thread_local Fiber* self;
thread_local Index block_index, block_size, grid_size;

constexpr size_t STACK_BYTES = 96 << 10;

struct Cta {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  ucontext_t scheduler;
  unsigned arrived = 0, generation = 0;
  bool agreed = true;
  std::function<void()> body;
};

static thread_local Cta* cta;

void yield() { swapcontext(&self->context, &cta->scheduler); }

static std::atomic<unsigned> pause_us, loads;

void linger() {
  yield();
  const unsigned us = pause_us.load();
  if (us && loads++ % 61 == 0) std::this_thread::sleep_for(std::chrono::microseconds(us));
}

void barrier() {
  const unsigned generation = cta->generation;
  if (++cta->arrived == cta->fibers.size()) {
    cta->arrived = 0;
    ++cta->generation;
  }
  while (cta->generation == generation) yield();
}

bool barrier_and(bool value) {
  if (!value) cta->agreed = false;
  barrier();
  const bool agreed = cta->agreed;
  // All have read it before it is used again.
  barrier();
  cta->agreed = true;
  return agreed;
}

const uint64_t* exchange(uint64_t value) {
  Warp& warp = *self->warp;
  const unsigned generation = warp.generation;
  warp.given[self->index.x % 32] = value;
  if (++warp.arrived == 32) {
    memcpy(warp.taken, warp.given, sizeof warp.given);
    warp.arrived = 0;
    ++warp.generation;
  }
  while (warp.generation == generation) yield();
  return warp.taken;
}

static void enter() {
  cta->body();
  self->done = true;
  yield();
}

static void run_cta(Index block, Index grid, unsigned threads, std::function<void()> body) {
  Cta here;
  cta = &here;
  block_index = block;
  grid_size = grid;
  block_size = {threads, 1, 1};
  here.body = body;
  here.fibers = std::vector<Fiber>(threads);
  here.warps = std::vector<Warp>(threads / 32);
  for (unsigned i = 0; i < threads; ++i) {
    Fiber& fiber = here.fibers[i];
    fiber.index = {i, 0, 0};
    fiber.warp = &here.warps[i / 32];
    fiber.stack.reset(new char[STACK_BYTES]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
  }
  for (unsigned left = threads; left;) {
    for (Fiber& fiber : here.fibers) {
      if (fiber.done) continue;
      self = &fiber;
      swapcontext(&here.scheduler, &fiber.context);
      if (fiber.done) --left;
    }
    std::this_thread::yield();
  }
}

}  // namespace emulated

#include "kernels.inc"

// How long a CTA pauses behind one in 61 of its waiting loads, which puts ranks out of step; 0 for not at all.
extern "C" void set_pauses(unsigned us) { emulated::pause_us = us; }

// One launch per rank, all at once; grids holds x and y of each. Returns when all have ended, 1 for an unknown kernel.
extern "C" int launch(const char* name, const void* params, unsigned ranks, const unsigned* grids, unsigned threads) {
  for (const Entry& entry : ENTRIES) {
    if (strcmp(entry.name, name)) continue;
    std::vector<std::thread> ctas;
    for (unsigned rank = 0; rank < ranks; ++rank) {
      const Index grid{grids[2 * rank], grids[2 * rank + 1], 1};
      const Params mine = static_cast<const Params*>(params)[rank];
      for (unsigned y = 0; y < grid.y; ++y)
        for (unsigned x = 0; x < grid.x; ++x)
          ctas.emplace_back([=] { emulated::run_cta({x, y, 0}, grid, threads, [=] { entry.kernel(mine); }); });
    }
    for (std::thread& each : ctas) each.join();
    return 0;
  }
  return 1;
}
