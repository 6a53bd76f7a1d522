// The machine behind the emulated Ascend C calls: cores, pipes, vector clocks, memories, counters.
//
// One kernel launch runs every core as a fiber of one host thread, so a run is deterministic. Instructions execute at
// once, in program order; what a real core may do out of order is caught by clocks instead: each pipe knows, for each
// pipe of its core (and each pipe of the other cores), up to which instruction that pipe is certainly finished. An
// access to memory whose last conflicting access is not in that knowledge is a missing synchronisation, whatever the
// numbers say.
#pragma once
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace emu {

// A violated rule of the device. `check` is a stable name (the tests match it), `text` says what happened.
struct Violation {
    std::string check;
    std::string text;
};

[[noreturn]] inline void Fail(const char* check, const char* format, ...) {
    char text[512];
    va_list args;
    va_start(args, format);
    std::vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    throw Violation{check, text};
}

enum Pipe : uint32_t { kS, kV, kM, kMTE1, kMTE2, kMTE3, kFIX, kPipeCount };
inline const char* PipeName(uint32_t pipe) {
    static const char* const names[kPipeCount] = {"S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX"};
    return names[pipe];
}

constexpr uint32_t kUbBytes = 192 * 1024;  // 910B: one vector core's unified buffer
// The memories of a core lie behind each other in one emulated address range; a cube core uses those after UB.
struct Space {
    uint32_t base, bytes;
    const char* name;
};
constexpr Space kUb = {0, kUbBytes, "UB"};
constexpr Space kL1 = {kUbBytes, 512 * 1024, "L1"};
constexpr Space kL0A = {kL1.base + kL1.bytes, 64 * 1024, "L0A"};
constexpr Space kL0B = {kL0A.base + kL0A.bytes, 64 * 1024, "L0B"};
constexpr Space kL0C = {kL0B.base + kL0B.bytes, 128 * 1024, "L0C"};
constexpr uint32_t kCoreBytes = kL0C.base + kL0C.bytes;
constexpr uint32_t kBlockBytes = 32;       // one DataBlock
constexpr uint32_t kRepeatBytes = 256;     // one vector repeat
constexpr uint32_t kEventIds = 8;

// For each pipe the number of its instructions that are certainly finished.
struct Clock {
    uint32_t done[kPipeCount] = {};
    void Join(const Clock& other) {
        for (uint32_t p = 0; p < kPipeCount; ++p) {
            if (other.done[p] > done[p]) { done[p] = other.done[p]; }
        }
    }
};

struct Stats {
    uint64_t gm_to_ub_bytes = 0;   // MTE2
    uint64_t ub_to_gm_bytes = 0;   // MTE3
    uint64_t vector_repeats = 0;   // 256-byte vector steps
    uint64_t vector_instructions = 0;
    uint64_t copy_instructions = 0;
    uint64_t scalar_gm_reads = 0;
    uint64_t scalar_ub_accesses = 0;
    uint64_t barriers = 0;
    uint64_t cube_products = 0;    // multiply-adds of Mmad
    void Add(const Stats& s) {
        gm_to_ub_bytes += s.gm_to_ub_bytes;
        ub_to_gm_bytes += s.ub_to_gm_bytes;
        vector_repeats += s.vector_repeats;
        vector_instructions += s.vector_instructions;
        copy_instructions += s.copy_instructions;
        scalar_gm_reads += s.scalar_gm_reads;
        scalar_ub_accesses += s.scalar_ub_accesses;
        barriers += s.barriers;
        cube_products += s.cube_products;
    }
};

// Last accesses to one DataBlock of UB. Two accesses that share a block but no byte count as a conflict: stricter than
// the hardware, never laxer.
struct BlockShadow {
    uint32_t write_time = 0;
    uint32_t write_pipe = 0;
    uint32_t read_time[kPipeCount] = {};
};

struct FlagState {
    bool set = false;
    Clock knowledge;
};

// What a core passes on with a flag to another core: what is known of its own pipes and of the other cores.
struct CrossSignal {
    uint32_t source = 0;
    Clock own;
    std::vector<Clock> foreign;
};

struct GmCell {
    uint32_t write_time = 0, read_time = 0;
    uint16_t write_core = 0, read_core = 0;
    uint8_t write_pipe = 0, read_pipe = 0;
};

// A tensor in global memory as the launch declares it. Reads and writes outside every region are out of bounds.
struct GmRegion {
    static constexpr uint32_t kCellsPerPage = 256;
    struct Page {
        GmCell cells[kCellsPerPage];
    };
    uint8_t* base = nullptr;
    uint64_t bytes = 0;
    std::string name;
    bool writable = false;
    bool scratch = false;     // workspace: reading what nobody wrote is an error
    uint32_t granule = 16;    // bytes that share one shadow cell
    std::unordered_map<uint64_t, std::unique_ptr<Page>> pages;

    GmCell& Cell(uint64_t index) {
        std::unique_ptr<Page>& page = pages[index / kCellsPerPage];
        if (!page) { page.reset(new Page()); }
        return page->cells[index % kCellsPerPage];
    }
};

struct Core {
    explicit Core(bool is_cube) : cube(is_cube) {}
    uint32_t index = 0;
    bool cube;                     // AIC; otherwise AIV
    uint32_t group = 0, sub = 0;   // launched group, and which of its vector cores
    std::vector<uint8_t> ub = std::vector<uint8_t>(cube ? kCoreBytes : kUbBytes, 0xA5);
    std::vector<uint8_t> written = std::vector<uint8_t>(ub.size(), 0);  // 1: byte holds a defined value
    std::vector<BlockShadow> shadow = std::vector<BlockShadow>(ub.size() / kBlockBytes);
    uint32_t issued[kPipeCount] = {};
    Clock known[kPipeCount];
    std::vector<Clock> foreign;   // per core: what is known of it since the last SyncAll
    FlagState flags[kPipeCount][kPipeCount][kEventIds];
    Stats stats;
    void* tpipe = nullptr;        // the live AscendC::TPipe
    uint32_t ub_peak = 0;         // most bytes that TPipe handed out at a time
    std::string leak;             // what a destroyed TPipe still held
    static constexpr uint32_t kNames = 1024;
    const char* names[kPipeCount][kNames] = {};
    // Signals that wait for this core, by flag id and (on a cube core) by the vector core that sent them.
    std::vector<CrossSignal> signals[16][2];

    const char* NameOf(uint32_t pipe, uint32_t time) const {
        return time != 0 && issued[pipe] - time < kNames ? names[pipe][time % kNames] : "an earlier instruction";
    }
    void Poison(uint32_t address, uint32_t bytes) {
        std::memset(&ub[address], 0xA5, bytes);
        std::memset(&written[address], 0, bytes);
    }
};

struct Machine {
    std::vector<std::unique_ptr<Core>> cores;
    std::vector<std::unique_ptr<GmRegion>> regions;
    std::vector<Clock> published;   // at the SyncAll under way
    Core* current = nullptr;
    uint32_t per_group = 1;
    uint64_t cross_events = 0;      // flags set or taken between cores: the scheduler's sign of progress
    int64_t mutant = -1;            // the synchronisation call that the mutation test switches off

    GmRegion& Find(const void* address, uint64_t bytes, const char* who) {
        const uint8_t* p = static_cast<const uint8_t*>(address);
        for (auto& region : regions) {
            if (p >= region->base && p < region->base + region->bytes) {
                if (static_cast<uint64_t>(p - region->base) + bytes > region->bytes) {
                    Fail("gm-bounds", "%s: %llu bytes at offset %llu of '%s' pass its end (%llu bytes)", who,
                         static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(p - region->base),
                         region->name.c_str(), static_cast<unsigned long long>(region->bytes));
                }
                return *region;
            }
        }
        Fail("gm-bounds", "%s: address is in no tensor of the launch", who);
    }
};

// The launch under way. Emulated kernels call free functions, so one pointer has to be reachable from everywhere.
inline Machine*& ActiveMachine() {
    static Machine* machine = nullptr;
    return machine;
}

inline Core& CurrentCore() {
    Machine* machine = ActiveMachine();
    if (machine == nullptr || machine->current == nullptr) { Fail("launch", "a device call outside a kernel launch"); }
    return *machine->current;
}

}  // namespace emu
