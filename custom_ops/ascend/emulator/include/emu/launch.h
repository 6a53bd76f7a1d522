// Runs a kernel on N emulated cores (fibers) and reports the first violated rule, if any, and the counters.
#pragma once
#include <ucontext.h>

#include <functional>

#include "machine.h"

namespace emu {

class Launcher {
public:
    // `per_group`: vector cores of a launched group, 2 in a mixed 1:2 kernel; `cubes`: each group has a cube core too.
    explicit Launcher(uint32_t vector_cores, uint32_t per_group = 1, bool cubes = false) {
        machine_.per_group = per_group;
        const uint32_t groups = vector_cores / per_group, all = vector_cores + (cubes ? groups : 0);
        for (uint32_t i = 0; i < all; ++i) {
            Core& core = *machine_.cores.emplace_back(new Core(i >= vector_cores));
            core.index = i;
            core.group = core.cube ? i - vector_cores : i / per_group;
            core.sub = core.cube ? 0 : i % per_group;
            core.foreign.resize(all);
        }
        machine_.published.resize(all);
    }

    GmRegion& AddRegion(const char* name, void* base, uint64_t bytes) {
        machine_.regions.emplace_back(new GmRegion());
        GmRegion& region = *machine_.regions.back();
        region.name = name;
        region.base = static_cast<uint8_t*>(base);
        region.bytes = bytes;
        return region;
    }

    Machine& machine() { return machine_; }

    // True when every core ran to its end without a violation.
    bool Run(const std::function<void()>& kernel) {
        kernel_ = &kernel;
        fibers_.clear();
        for (size_t i = 0; i < machine_.cores.size(); ++i) { fibers_.emplace_back(new Fiber()); }
        Launcher* outer = Active();
        Active() = this;
        ActiveMachine() = &machine_;
        for (size_t i = 0; i < fibers_.size(); ++i) { Prepare(*fibers_[i]); }
        Schedule();
        Active() = outer;
        ActiveMachine() = nullptr;
        return !failed_;
    }

    const Violation& violation() const { return violation_; }
    Stats Total() const {
        Stats total;
        for (const auto& core : machine_.cores) { total.Add(core->stats); }
        return total;
    }

    static Launcher*& Active() {
        static Launcher* active = nullptr;
        return active;
    }

    // Called by a fiber: returns when every core has come to its SyncAll.
    void AwaitAll() {
        Fiber& fiber = *fibers_[machine_.current->index];
        fiber.waiting = true;
        ++progress_;
        swapcontext(&fiber.context, &scheduler_);
    }

    // Lets the other cores run: the caller waits for something that they do.
    void Yield() {
        Fiber& fiber = *fibers_[machine_.current->index];
        swapcontext(&fiber.context, &scheduler_);
    }

private:
    struct Fiber {
        ucontext_t context;
        std::vector<char> stack = std::vector<char>(256 * 1024);
        bool waiting = false, finished = false;
    };

    void Prepare(Fiber& fiber) {
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = &scheduler_;
        makecontext(&fiber.context, &Launcher::Entry, 0);
    }

    static void Entry() { Active()->Body(); }

    void Body() {
        Core& core = *machine_.current;
        try {
            (*kernel_)();
            CheckEnd(core);
        } catch (const Violation& violation) {
            failed_ = true;
            violation_ = violation;
            violation_.text = "core " + std::to_string(core.index) + ": " + violation.text;
        }
        fibers_[core.index]->finished = true;
        ++progress_;
    }

    static void CheckEnd(const Core& core) {
        if (!core.leak.empty()) { Fail("queue-discipline", "%s", core.leak.c_str()); }
        for (uint32_t s = 0; s < kPipeCount; ++s) {
            for (uint32_t d = 0; d < kPipeCount; ++d) {
                for (uint32_t id = 0; id < kEventIds; ++id) {
                    if (core.flags[s][d][id].set) {
                        Fail("flag-pairing", "flag %s_%s id %u is set and never waited for", PipeName(s), PipeName(d), id);
                    }
                }
            }
        }
    }

    void Schedule() {
        for (;;) {
            size_t waiting = 0, finished = 0;
            const uint64_t progress = progress_ + machine_.cross_events;
            for (size_t i = 0; i < fibers_.size() && !failed_; ++i) {
                Fiber& fiber = *fibers_[i];
                if (!fiber.finished && !fiber.waiting) {
                    machine_.current = machine_.cores[i].get();
                    swapcontext(&scheduler_, &fiber.context);
                }
                waiting += fiber.waiting ? 1 : 0;
                finished += fiber.finished ? 1 : 0;
            }
            if (failed_ || finished == fibers_.size()) { return; }
            if (waiting + finished < fibers_.size()) {
                if (progress != progress_ + machine_.cross_events) { continue; }
                failed_ = true;
                violation_ = Violation{"cross-core", "every core waits for a flag that nobody sets: the device would hang"};
                return;
            }
            if (waiting != fibers_.size()) {
                failed_ = true;
                violation_ = Violation{"sync-all", "some cores wait in SyncAll and others ended without it: the device would hang"};
                return;
            }
            Release();
        }
    }

    void Release() {
        for (size_t i = 0; i < fibers_.size(); ++i) {
            machine_.published[i] = machine_.cores[i]->known[kS];
            fibers_[i]->waiting = false;
        }
        for (auto& core : machine_.cores) {
            for (size_t i = 0; i < fibers_.size(); ++i) { core->foreign[i].Join(machine_.published[i]); }
        }
    }

    Machine machine_;
    const std::function<void()>* kernel_ = nullptr;
    std::vector<std::unique_ptr<Fiber>> fibers_;
    ucontext_t scheduler_ = {};
    bool failed_ = false;
    uint64_t progress_ = 0;   // cores that finished or came to a SyncAll
    Violation violation_;
};

}  // namespace emu
