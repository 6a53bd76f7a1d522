// Flags, barriers and SyncAll: the only things besides queues that order pipes and cores.
#pragma once
#include "launch.h"
#include "tensor.h"

enum pipe_t { PIPE_S = 0, PIPE_V = 1, PIPE_M = 2, PIPE_MTE1 = 3, PIPE_MTE2 = 4, PIPE_MTE3 = 5, PIPE_ALL = 6, PIPE_FIX = 10 };

namespace AscendC {

enum class HardEvent : uint8_t {
    MTE2_MTE1, MTE1_MTE2, MTE1_M, M_MTE1, MTE2_V, V_MTE2, MTE3_V, V_MTE3, M_V, V_M, V_V, MTE3_MTE1, MTE1_MTE3, MTE1_V,
    MTE2_M, M_MTE2, V_MTE1, M_FIX, FIX_M, MTE3_MTE2, MTE2_MTE3, S_V, V_S, S_MTE2, MTE2_S, S_MTE3, MTE3_S, MTE2_FIX,
    FIX_MTE2, FIX_S, M_S, FIX_MTE3, MTE1_FIX, FIX_MTE1, FIX_FIX
};

}  // namespace AscendC

namespace emu {

struct PipePair {
    Pipe source, destination;
};

constexpr PipePair PipesOf(AscendC::HardEvent event) {
    using E = AscendC::HardEvent;
    switch (event) {
        case E::MTE2_MTE1: return {kMTE2, kMTE1};
        case E::MTE1_MTE2: return {kMTE1, kMTE2};
        case E::MTE1_M: return {kMTE1, kM};
        case E::M_MTE1: return {kM, kMTE1};
        case E::MTE2_V: return {kMTE2, kV};
        case E::V_MTE2: return {kV, kMTE2};
        case E::MTE3_V: return {kMTE3, kV};
        case E::V_MTE3: return {kV, kMTE3};
        case E::M_FIX: return {kM, kFIX};
        case E::FIX_M: return {kFIX, kM};
        case E::MTE3_MTE2: return {kMTE3, kMTE2};
        case E::MTE2_MTE3: return {kMTE2, kMTE3};
        case E::S_V: return {kS, kV};
        case E::V_S: return {kV, kS};
        case E::S_MTE2: return {kS, kMTE2};
        case E::MTE2_S: return {kMTE2, kS};
        case E::S_MTE3: return {kS, kMTE3};
        case E::MTE3_S: return {kMTE3, kS};
        case E::FIX_MTE2: return {kFIX, kMTE2};
        default: return {kPipeCount, kPipeCount};
    }
}

constexpr Pipe PipeIndex(pipe_t pipe) {
    switch (pipe) {
        case PIPE_S: return kS;
        case PIPE_V: return kV;
        case PIPE_M: return kM;
        case PIPE_MTE1: return kMTE1;
        case PIPE_MTE2: return kMTE2;
        case PIPE_MTE3: return kMTE3;
        case PIPE_FIX: return kFIX;
        default: return kPipeCount;
    }
}

// What is known at a point in the order of `pipe` behind all its earlier instructions.
inline Clock KnowledgeAfter(Core& core, Pipe pipe) {
    Clock clock = core.known[pipe];
    clock.done[pipe] = core.issued[pipe];
    return clock;
}

}  // namespace emu

namespace AscendC {

template <HardEvent event>
__aicore__ inline void SetFlag(int32_t id) {
    constexpr emu::PipePair pipes = emu::PipesOf(event);
    static_assert(pipes.source != emu::kPipeCount, "this HardEvent is not modelled");
    if (id < 0 || id >= static_cast<int32_t>(emu::kEventIds)) { emu::Fail("flag-range", "event id %d is outside 0..7", id); }
    emu::Core& core = emu::CurrentCore();
    emu::FlagState& flag = core.flags[pipes.source][pipes.destination][id];
    if (flag.set) {
        emu::Fail("flag-pairing", "flag %s_%s id %d is set twice without a wait", emu::PipeName(pipes.source),
                  emu::PipeName(pipes.destination), id);
    }
    flag.set = true;
    flag.knowledge = emu::KnowledgeAfter(core, pipes.source);
}

template <HardEvent event>
__aicore__ inline void WaitFlag(int32_t id) {
    constexpr emu::PipePair pipes = emu::PipesOf(event);
    static_assert(pipes.source != emu::kPipeCount, "this HardEvent is not modelled");
    if (id < 0 || id >= static_cast<int32_t>(emu::kEventIds)) { emu::Fail("flag-range", "event id %d is outside 0..7", id); }
    emu::Core& core = emu::CurrentCore();
    emu::FlagState& flag = core.flags[pipes.source][pipes.destination][id];
    if (!flag.set) {
        emu::Fail("flag-pairing", "WaitFlag %s_%s id %d without a SetFlag: the device would hang", emu::PipeName(pipes.source),
                  emu::PipeName(pipes.destination), id);
    }
    flag.set = false;
    core.known[pipes.destination].Join(flag.knowledge);
}

template <pipe_t pipe>
__aicore__ inline void PipeBarrier() {
    static_assert(pipe != PIPE_S, "PipeBarrier<PIPE_S> does not exist: the scalar unit is in order");
    emu::Core& core = emu::CurrentCore();
    ++core.stats.barriers;
    if constexpr (pipe == PIPE_ALL) {
        for (uint32_t p = 0; p < emu::kPipeCount; ++p) {
            for (uint32_t q = 0; q < emu::kPipeCount; ++q) { core.known[p].done[q] = core.issued[q]; }
        }
    } else {
        constexpr emu::Pipe p = emu::PipeIndex(pipe);
        core.known[p].done[p] = core.issued[p];
    }
}

// Hardware barrier over all cores. It passes on only what this core's scalar unit knows to be finished: without a
// PipeBarrier<PIPE_ALL> before it, copies under way are not covered.
template <bool isAIVOnly = true>
__aicore__ inline void SyncAll() {
    const emu::Machine& machine = *emu::ActiveMachine();
    if (isAIVOnly && machine.cores.back()->cube) { emu::Fail("sync-all", "in a mixed kernel only SyncAll<false> is modelled"); }
    emu::Launcher::Active()->AwaitAll();
}

// On a vector core it counts vector cores, on a cube core groups; GetBlockNum always counts launched groups.
__aicore__ inline int64_t GetBlockIdx() {
    const emu::Core& core = emu::CurrentCore();
    return core.cube ? core.group : core.group * emu::ActiveMachine()->per_group + core.sub;
}
__aicore__ inline int64_t GetBlockNum() { return emu::ActiveMachine()->cores.back()->group + 1; }
__aicore__ inline int64_t GetTaskRation() { return emu::CurrentCore().cube ? 1 : emu::ActiveMachine()->per_group; }
__aicore__ inline int64_t GetSubBlockIdx() { return emu::CurrentCore().sub; }

}  // namespace AscendC
