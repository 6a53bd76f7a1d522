// TPipe, TQue, TQueBind and TBuf: UB allocation, queue discipline and the synchronisation that queues carry.
#pragma once
#include <exception>

#include "sync.h"

namespace emu {

struct QueueBuffer {
    enum class State { kIdle, kAllocated, kQueued, kDequeued };
    uint32_t address = 0, bytes = 0;
    State state = State::kIdle;
    Clock filled, freed;
};

struct QueueState {
    std::vector<QueueBuffer> buffers;
    std::vector<size_t> order;  // queued buffers, oldest first
    size_t next = 0;
    uint32_t depth = 1;
    const char* where = "";
};

constexpr uint32_t kMaxBuffers = 64;
constexpr uint32_t kMaxOutstanding = 8;

constexpr Space SpaceOf(AscendC::TPosition position) {
    using P = AscendC::TPosition;
    switch (position) {
        case P::A1:
        case P::B1: return kL1;
        case P::A2: return kL0A;
        case P::B2: return kL0B;
        case P::CO1: return kL0C;
        default: return kUb;
    }
}

// (pipe that fills, pipe that consumes) of a queue between two positions.
constexpr PipePair QueuePipes(AscendC::TPosition source, AscendC::TPosition destination) {
    using P = AscendC::TPosition;
    if (source == P::VECIN && destination == P::VECIN) { return {kMTE2, kV}; }
    if (source == P::VECIN && destination == P::VECOUT) { return {kMTE2, kMTE3}; }
    if (source == P::VECOUT) { return {kV, kMTE3}; }
    if (source == P::VECCALC) { return {kV, kV}; }
    if (source == P::A1 || source == P::B1) { return {kMTE2, kMTE1}; }
    if (source == P::A2 || source == P::B2) { return {kMTE1, kM}; }
    if (source == P::CO1) { return {kM, kFIX}; }
    return {kPipeCount, kPipeCount};
}

}  // namespace emu

namespace AscendC {

class TPipe;

template <TPosition src, TPosition dst, int32_t depth, auto mask = 0>
class TQueBind {
public:
    template <typename T>
    __aicore__ inline LocalTensor<T> AllocTensor() {
        CheckReady("AllocTensor");
        for (size_t i = 0; i < state_->buffers.size(); ++i) {
            const size_t at = (state_->next + i) % state_->buffers.size();
            emu::QueueBuffer& buffer = state_->buffers[at];
            if (buffer.state != emu::QueueBuffer::State::kIdle) { continue; }
            state_->next = (at + 1) % state_->buffers.size();
            buffer.state = emu::QueueBuffer::State::kAllocated;
            emu::Core& core = emu::CurrentCore();
            core.known[kPipes.source].Join(buffer.freed);
            core.Poison(buffer.address, buffer.bytes);
            return LocalTensor<T>(buffer.address, buffer.bytes);
        }
        emu::Fail("queue-discipline", "AllocTensor: all %zu buffers of the queue are in use (FreeTensor missing?)", state_->buffers.size());
    }

    template <typename T>
    __aicore__ inline bool EnQue(const LocalTensor<T>& tensor) {
        const size_t at = Locate(tensor.EmuAddress(), "EnQue");
        emu::QueueBuffer& buffer = state_->buffers[at];
        if (buffer.state != emu::QueueBuffer::State::kAllocated) { emu::Fail("queue-discipline", "EnQue of a tensor that is not freshly allocated"); }
        buffer.state = emu::QueueBuffer::State::kQueued;
        buffer.filled = emu::KnowledgeAfter(emu::CurrentCore(), kPipes.source);
        state_->order.push_back(at);
        return true;
    }

    template <typename T>
    __aicore__ inline LocalTensor<T> DeQue() {
        CheckReady("DeQue");
        if (state_->order.empty()) { emu::Fail("queue-discipline", "DeQue from an empty queue: the device would hang"); }
        emu::QueueBuffer& buffer = state_->buffers[state_->order.front()];
        state_->order.erase(state_->order.begin());
        buffer.state = emu::QueueBuffer::State::kDequeued;
        emu::CurrentCore().known[kPipes.destination].Join(buffer.filled);
        return LocalTensor<T>(buffer.address, buffer.bytes);
    }

    template <typename T>
    __aicore__ inline void FreeTensor(const LocalTensor<T>& tensor) {
        emu::QueueBuffer& buffer = state_->buffers[Locate(tensor.EmuAddress(), "FreeTensor")];
        if (buffer.state != emu::QueueBuffer::State::kDequeued) {
            emu::Fail("queue-discipline", "FreeTensor of a tensor that did not go through EnQue and DeQue");
        }
        buffer.state = emu::QueueBuffer::State::kIdle;
        buffer.freed = emu::KnowledgeAfter(emu::CurrentCore(), kPipes.destination);
    }

    __aicore__ inline bool HasTensorInQue() const { return !state_->order.empty(); }

    // For the mutation test only: DeQue left out (the tensor is used as EnQue got it), and DeQue without its wait.
    template <typename T>
    LocalTensor<T> EmuNoDeQue() const {
        if (state_->order.empty()) { emu::Fail("queue-discipline", "the queue is empty"); }
        const emu::QueueBuffer& buffer = state_->buffers[state_->order.back()];
        return LocalTensor<T>(buffer.address, buffer.bytes);
    }
    template <typename T>
    LocalTensor<T> EmuDeQueWithoutWait() {
        const emu::Clock before = emu::CurrentCore().known[kPipes.destination];
        const LocalTensor<T> tensor = DeQue<T>();
        emu::CurrentCore().known[kPipes.destination] = before;
        return tensor;
    }

private:
    friend class TPipe;
    static constexpr emu::PipePair kPipes = emu::QueuePipes(src, dst);
    static_assert(kPipes.source != emu::kPipeCount, "this queue position is not modelled");
    static_assert(depth >= 1 && depth <= 8, "queue depth outside 1..8");

    void CheckReady(const char* who) const {
        if (state_->buffers.empty()) { emu::Fail("queue-discipline", "%s on a queue without InitBuffer", who); }
    }
    size_t Locate(uint32_t address, const char* who) const {
        CheckReady(who);
        for (size_t i = 0; i < state_->buffers.size(); ++i) {
            if (state_->buffers[i].address == address) { return i; }
        }
        emu::Fail("queue-discipline", "%s of a tensor that is not the start of a buffer of this queue", who);
    }

    // Shared with the TPipe: the queue may be destroyed first.
    std::shared_ptr<emu::QueueState> state_ = std::make_shared<emu::QueueState>();
};

template <TPosition pos, int32_t depth, auto mask = 0>
class TQue : public TQueBind<pos, pos, depth, mask> {};

template <TPosition pos>
class TBuf {
public:
    template <typename T>
    __aicore__ inline LocalTensor<T> Get() const { return Get<T>(bytes_ / sizeof(T)); }
    template <typename T>
    __aicore__ inline LocalTensor<T> Get(uint32_t length) const { return GetWithOffset<T>(length, 0); }
    template <typename T>
    __aicore__ inline LocalTensor<T> GetWithOffset(uint32_t length, uint32_t offset) const {
        const uint64_t end = offset + static_cast<uint64_t>(length) * sizeof(T);
        if (end > bytes_) { emu::Fail("ub-extent", "TBuf::Get of %llu bytes from a buffer of %u", static_cast<unsigned long long>(end), bytes_); }
        return LocalTensor<T>(address_ + offset, static_cast<uint32_t>(length * sizeof(T)));
    }

private:
    friend class TPipe;
    uint32_t address_ = 0, bytes_ = 0;
};

class TPipe {
public:
    __aicore__ inline TPipe() : core_(&emu::CurrentCore()) {
        if (core_->tpipe != nullptr) { emu::Fail("queue-discipline", "a second TPipe while one is alive"); }
        core_->tpipe = this;
    }
    TPipe(const TPipe&) = delete;
    TPipe& operator=(const TPipe&) = delete;
    __aicore__ inline ~TPipe() {
        if (std::uncaught_exceptions() == 0) { core_->leak = Held(); }
        core_->tpipe = nullptr;
    }

    template <TPosition src, TPosition dst, int32_t depth, auto mask>
    __aicore__ inline bool InitBuffer(TQueBind<src, dst, depth, mask>& queue, emu::U8 num, uint32_t length) {
        queue.state_ = std::make_shared<emu::QueueState>();
        queue.state_->depth = depth;
        for (uint32_t i = 0; i < num; ++i) {
            emu::QueueBuffer buffer;
            buffer.address = Take(emu::SpaceOf(src), length, &buffer.bytes);
            queue.state_->buffers.push_back(buffer);
        }
        queue_buffers_ += num;
        if (queue_buffers_ > emu::kMaxOutstanding) {
            emu::Fail("queue-discipline", "%u queue buffers need event ids, the core has %u", queue_buffers_, emu::kMaxOutstanding);
        }
        queues_.push_back(queue.state_);
        return true;
    }

    template <TPosition pos>
    __aicore__ inline bool InitBuffer(TBuf<pos>& buffer, uint32_t length) {
        buffer.address_ = Take(emu::SpaceOf(pos), length, &buffer.bytes_);
        return true;
    }

    __aicore__ inline void Reset() {
        const std::string held = Held();
        if (!held.empty()) { emu::Fail("queue-discipline", "%s", held.c_str()); }
        queues_.clear();
        used_.clear();
        count_ = queue_buffers_ = 0;
    }

    __aicore__ inline TEventID FetchEventID(HardEvent event) {
        const emu::PipePair pipes = emu::PipesOf(event);
        for (uint32_t id = 0; id < emu::kEventIds; ++id) {
            if (!core_->flags[pipes.source][pipes.destination][id].set) { return static_cast<TEventID>(id); }
        }
        emu::Fail("flag-range", "all event ids of a pipe pair are in use");
    }

private:
    uint32_t Take(const emu::Space& space, uint32_t length, uint32_t* bytes) {
        if ((space.base != emu::kUb.base) != core_->cube) { emu::Fail("ub-capacity", "this kind of core has no %s", space.name); }
        *bytes = (length + emu::kBlockBytes - 1) / emu::kBlockBytes * emu::kBlockBytes;
        if (length == 0) { emu::Fail("ub-capacity", "InitBuffer of 0 bytes"); }
        if (++count_ > emu::kMaxBuffers) { emu::Fail("ub-capacity", "more than %u buffers", emu::kMaxBuffers); }
        uint32_t& used = used_[space.base];
        if (used + *bytes > space.bytes) {
            emu::Fail("ub-capacity", "buffers need %u bytes of %s, the core has %u", used + *bytes, space.name, space.bytes);
        }
        const uint32_t address = space.base + used;
        used += *bytes;
        if (space.base == emu::kUb.base && used > core_->ub_peak) { core_->ub_peak = used; }
        core_->Poison(address, *bytes);
        return address;
    }

    std::string Held() const {
        for (const auto& queue : queues_) {
            for (const emu::QueueBuffer& buffer : queue->buffers) {
                if (buffer.state != emu::QueueBuffer::State::kIdle) { return "a queue still holds a tensor at its end (FreeTensor or DeQue missing)"; }
            }
        }
        return {};
    }

    emu::Core* core_;
    std::vector<std::shared_ptr<emu::QueueState>> queues_;
    std::unordered_map<uint32_t, uint32_t> used_;   // by the base of the space
    uint32_t count_ = 0, queue_buffers_ = 0;
};

}  // namespace AscendC
