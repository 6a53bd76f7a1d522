// One emulated instruction: takes its place in its pipe and checks each memory access against the clocks.
#pragma once
#include "machine.h"

namespace emu {

class Instruction {
public:
    Instruction(Pipe pipe, const char* name) : core_(CurrentCore()), pipe_(pipe), name_(name) {
        time_ = ++core_.issued[pipe];
        core_.names[pipe][time_ % Core::kNames] = name;
        Clock& mine = core_.known[pipe];
        // The scalar unit issues every instruction, so whatever it waited for is over. Its own writes to UB are not:
        // they need S_V or S_MTE3.
        const uint32_t scalar_writes = mine.done[kS];
        mine.Join(core_.known[kS]);
        if (pipe != kS) { mine.done[kS] = scalar_writes; }
        if (pipe == kS) { mine.done[kS] = time_; }
    }

    Core& core() { return core_; }
    const char* name() const { return name_; }

    void Read(uint32_t address, uint32_t bytes) {
        if (bytes == 0) { return; }
        if (std::memchr(&core_.written[address], 0, bytes) != nullptr) {
            Fail("uninitialised", "%s reads UB bytes [%u, %u) that hold no defined value", name_, address, address + bytes);
        }
        const Clock& known = core_.known[pipe_];
        for (uint32_t b = address / kBlockBytes; b <= (address + bytes - 1) / kBlockBytes; ++b) {
            BlockShadow& s = core_.shadow[b];
            if (s.write_time > known.done[s.write_pipe] && !Mine(s.write_pipe, s.write_time)) {
                Race("read after write", b, s.write_pipe, s.write_time);
            }
            s.read_time[pipe_] = time_;
        }
    }

    void Write(uint32_t address, uint32_t bytes) {
        if (bytes == 0) { return; }
        const Clock& known = core_.known[pipe_];
        for (uint32_t b = address / kBlockBytes; b <= (address + bytes - 1) / kBlockBytes; ++b) {
            BlockShadow& s = core_.shadow[b];
            if (s.write_time > known.done[s.write_pipe] && !Mine(s.write_pipe, s.write_time)) {
                Race("write after write", b, s.write_pipe, s.write_time);
            }
            for (uint32_t p = 0; p < kPipeCount; ++p) {
                if (s.read_time[p] > known.done[p] && !Mine(p, s.read_time[p])) {
                    Race("write after read", b, p, s.read_time[p]);
                }
            }
            s.write_time = time_;
            s.write_pipe = pipe_;
        }
        std::memset(&core_.written[address], 1, bytes);
    }

    // Returns where the bytes are; `who` must stay inside one region.
    void ReadGm(const void* address, uint64_t bytes) {
        if (bytes == 0) { return; }
        GmRegion& region = ActiveMachine()->Find(address, bytes, name_);
        if (!region.writable) { return; }
        ForCells(region, address, bytes, [&](GmCell& cell) {
            if (region.scratch && cell.write_time == 0) {
                Fail("uninitialised", "%s reads part of '%s' that nobody wrote", name_, region.name.c_str());
            }
            if (cell.write_time != 0 && pipe_ == kS && cell.write_pipe != kS) {
                Fail("data-cache", "%s: scalar read of '%s' after a pipe wrote it: the data cache may be stale", name_,
                     region.name.c_str());
            }
            if (cell.write_time != 0) { Ordered("read after write", region, cell.write_core, cell.write_pipe, cell.write_time); }
            cell.read_core = static_cast<uint16_t>(core_.index);
            cell.read_pipe = static_cast<uint8_t>(pipe_);
            cell.read_time = time_;
        });
    }

    void WriteGm(const void* address, uint64_t bytes) {
        if (bytes == 0) { return; }
        GmRegion& region = ActiveMachine()->Find(address, bytes, name_);
        if (!region.writable) { Fail("gm-bounds", "%s writes the input '%s'", name_, region.name.c_str()); }
        ForCells(region, address, bytes, [&](GmCell& cell) {
            if (cell.write_time != 0) { Ordered("write after write", region, cell.write_core, cell.write_pipe, cell.write_time); }
            if (cell.read_time != 0) { Ordered("write after read", region, cell.read_core, cell.read_pipe, cell.read_time); }
            cell.write_core = static_cast<uint16_t>(core_.index);
            cell.write_pipe = static_cast<uint8_t>(pipe_);
            cell.write_time = time_;
        });
    }

private:
    bool Mine(uint32_t pipe, uint32_t time) const { return pipe == pipe_ && time == time_; }

    template <typename F>
    void ForCells(GmRegion& region, const void* address, uint64_t bytes, F visit) {
        const uint64_t offset = static_cast<uint64_t>(static_cast<const uint8_t*>(address) - region.base);
        for (uint64_t i = offset / region.granule; i <= (offset + bytes - 1) / region.granule; ++i) { visit(region.Cell(i)); }
    }

    void Ordered(const char* kind, const GmRegion& region, uint32_t core, uint32_t pipe, uint32_t time) {
        const bool own = core == core_.index;
        const uint32_t done = own ? core_.known[pipe_].done[pipe] : core_.foreign[core].done[pipe];
        if (time <= done || (own && Mine(pipe, time))) { return; }
        Fail("happens-before", "%s on pipe %s of core %u: %s of '%s' is not ordered after pipe %s of core %u", name_,
             PipeName(pipe_), core_.index, kind, region.name.c_str(), PipeName(pipe), core);
    }

    [[noreturn]] void Race(const char* kind, uint32_t block, uint32_t pipe, uint32_t time) {
        Fail("happens-before", "%s on pipe %s: %s of UB block %u is not ordered after %s on pipe %s", name_,
             PipeName(pipe_), kind, block, core_.NameOf(pipe, time), PipeName(pipe));
    }

    Core& core_;
    Pipe pipe_;
    const char* name_;
    uint32_t time_ = 0;
};

}  // namespace emu
