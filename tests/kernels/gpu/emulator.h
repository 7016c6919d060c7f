// Emulate the GPU functions that `matmul.cu` calls, so that tests can run it on a CPU.
//
// Each GPU thread is a fiber. At a barrier, a fiber waits until all fibers of its warp or block
// have arrived.

#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

typedef uint32_t u32;
typedef uint16_t u16;
typedef uint8_t u8;
typedef uint64_t u64;

#define DEVICE inline
#define __global__
#define __launch_bounds__(...)
#define SHARED_ARRAY(name, bytes) u8* name = emulator::shared_memory()

struct Index { u32 x = 0, y = 0, z = 0; };

namespace emulator {

struct Barrier { int arrived = 0, round = 0; };

struct Copy { void* to; const void* from; bool is_inside; };

struct Fiber {
    std::deque<std::vector<Copy>> copies{1};  // the last group is not committed yet
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    Index thread, place;  // `place` is the index of the block in the grid
    int warp = 0, turn = 0, value_turn = 0;
    bool is_done = false;
    Barrier* waits_for = nullptr;
    int waits_in = 0;
};

// Hold the operands of an `mma` instruction of a warp. A warp has two of these, because a lane can
// be one instruction ahead of another lane.
struct Operands { u32 a[32][4], b[32][2]; };

struct Block {
    std::vector<Fiber> fibers;
    std::vector<u8> shared;
    std::vector<Barrier> warps;
    Barrier all;
    std::vector<Operands> operands;  // two per warp
    std::vector<std::array<float, 32>> values;  // two per warp
};

inline ucontext_t scheduler;
inline Fiber* current;
inline Block* block;

inline u8* shared_memory() { return block->shared.data(); }

inline void wait(Barrier& barrier, int count) {
    int round = barrier.round;
    if (++barrier.arrived == count) {
        barrier.arrived = 0;
        ++barrier.round;
        return;
    }
    current->waits_for = &barrier;
    current->waits_in = round;
    swapcontext(&current->context, &scheduler);
}

inline float of_16_bits(u16 bits) {
#if F16
    int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    float value = exponent == 31 ? (mantissa ? NAN : INFINITY)
                  : exponent     ? std::ldexp(1024.0f + mantissa, exponent - 25)
                                 : std::ldexp(static_cast<float>(mantissa), -24);
    return bits >> 15 ? -value : value;
#else
    u32 wide = static_cast<u32>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
#endif
}

// Round to bf16, with ties to even. `to_f16` rounds in the same way.
inline u16 to_bf16(float value) {
    u32 bits;
    std::memcpy(&bits, &value, 4);
    if (std::isnan(value)) return 0x7FFF;
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

inline u16 to_f16(float value) {
    if (std::isnan(value)) return 0x7FFF;
    u16 sign = std::signbit(value) ? 0x8000 : 0;
    float size = std::fabs(value);
    if (size >= 65520.0f) return sign | 0x7C00;
    int exponent = size == 0 ? -14 : std::max(std::ilogb(size), -14);
    float mantissa = std::nearbyint(std::ldexp(size, 10 - exponent));
    if (mantissa == 2048) mantissa = 1024, ++exponent;
    u32 bits = static_cast<u32>(mantissa);
    return sign | (bits >= 1024 ? (exponent + 15) << 10 | (bits - 1024) : bits);
}

}  // namespace emulator

#define threadIdx (emulator::current->thread)
#define blockIdx (emulator::current->place)

inline void __syncthreads() { emulator::wait(emulator::block->all, THREADS_OF_BLOCK); }
inline void __syncwarp() { emulator::wait(emulator::block->warps[emulator::current->warp], 32); }
inline u32 bytes_of(u32 a, u32 b, u32 selector) {
    u64 both = a | static_cast<u64>(b) << 32;
    u32 out = 0;
    for (int i = 0; i < 4; ++i) out |= (both >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
    return out;
}

// Perform copies as late as possible: when the kernel waits for them. A missing wait then fails.
inline void copy_16_bytes(void* to, const void* from, bool is_inside) {
    if ((is_inside && reinterpret_cast<u64>(from) % 16) || reinterpret_cast<u64>(to) % 16) std::abort();
    emulator::current->copies.back().push_back({to, from, is_inside});
}
inline void commit_copies() { emulator::current->copies.emplace_back(); }
template <int PENDING> void wait_for_copies() {
    auto& copies = emulator::current->copies;
    for (; copies.size() > PENDING + 1; copies.pop_front())
        for (auto& copy : copies.front())
            if (copy.is_inside) std::memcpy(copy.to, copy.from, 16);
            else std::memset(copy.to, 0, 16);
}

inline u32 opaque(u32 constant) { return constant; }

inline float from_bits(u32 bits) {
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

inline float from_f16(u16 bits) {
    int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    float value = exponent == 31 ? (mantissa ? NAN : INFINITY)
                  : exponent     ? std::ldexp(1024.0f + mantissa, exponent - 25)
                                 : std::ldexp(static_cast<float>(mantissa), -24);
    return bits >> 15 ? -value : value;
}

inline u16 to_16_bits(float value) { return OUT == 2 ? emulator::to_f16(value) : emulator::to_bf16(value); }

inline u16 to_x_bits(float value) { return F16 ? emulator::to_f16(value) : emulator::to_bf16(value); }

inline u32 pair_of_number(int number) { return to_x_bits(static_cast<float>(number)) * 0x00010001u; }

inline u32 difference(u32 a, u32 b) {
    u32 out = 0;
    for (int half = 0; half < 32; half += 16) {
        float value = emulator::of_16_bits(a >> half) - emulator::of_16_bits(b >> half);
        out |= static_cast<u32>(to_x_bits(value)) << half;
    }
    return out;
}

inline u32 pair_of_float8(u32 two) {
    u32 out = 0;
    for (int half = 0; half < 2; ++half) {
        u32 byte = two >> 8 * half & 0xFF;
        float value;
        if (FORM == 2) {
            int exponent = byte >> 3 & 15, mantissa = byte & 7;
            value = exponent == 15 && mantissa == 7 ? NAN
                    : exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp(float(mantissa), -9);
            value = byte & 0x80 ? -value : value;
        } else {
            value = from_f16(byte << 8);
        }
        out |= static_cast<u32>(to_x_bits(value)) << 16 * half;
    }
    return out;
}

// Exchange one value per lane, and return the values of all lanes of the warp.
inline const float* of_all_lanes(float value) {
    auto& all = emulator::block->values[2 * emulator::current->warp + emulator::current->value_turn];
    emulator::current->value_turn ^= 1;
    all[emulator::current->thread.x % 32] = value;
    __syncwarp();
    return all.data();
}
template <typename T> T of_lane(T value, int lane) {  // `value` must be exact in f32
    return static_cast<T>(of_all_lanes(static_cast<float>(value))[lane]);
}
inline int of_lane_xor(int value, int mask) {
    return of_lane(value, (emulator::current->thread.x % 32) ^ mask);
}
inline int add_signed_bytes(u32 word, int sum) {
    for (int i = 0; i < 4; ++i) sum += static_cast<int8_t>(word >> 8 * i);
    return sum;
}
inline u32 largest_of_16(u32 value) {  // `value` must be exact in f32
    const float* all = of_all_lanes(static_cast<float>(value)) + emulator::current->thread.x % 32 / 16 * 16;
    return static_cast<u32>(*std::max_element(all, all + 16));
}
inline u32 larger_halves(u32 a, u32 b) {
    return std::max(a & 0xFFFFu, b & 0xFFFFu) | std::max(a >> 16, b >> 16) << 16;
}
inline void keep_branch() {}
inline u32 to_bits(float value) {
    u32 out;
    std::memcpy(&out, &value, 4);
    return out;
}
inline float fused_multiply_add(float a, float b, float c) { return std::fma(a, b, c); }

// Write a lane's operands of an `mma` instruction, and return those of all lanes of the warp.
inline const emulator::Operands& share_operands(std::array<u32, 4> a, std::array<u32, 2> b) {
    using namespace emulator;
    int lane = current->thread.x % 32;
    Operands& all = block->operands[2 * current->warp + current->turn];
    current->turn ^= 1;
    std::copy(a.begin(), a.end(), all.a[lane]);
    std::copy(b.begin(), b.end(), all.b[lane]);
    __syncwarp();
    return all;
}

inline void multiply_add_bytes(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    using namespace emulator;
    int lane = current->thread.x % 32;
    const Operands& all = share_operands({a0, a1, a2, a3}, {b0, b1});
    for (int i = 0; i < 4; ++i) {
        int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
        for (int k = 0; k < 32; ++k) {
            u32 a = all.a[row % 8 * 4 + k % 16 / 4][row / 8 + 2 * (k / 16)] >> 8 * (k % 4) & 0xFF;
            u32 b = all.b[column * 4 + k % 16 / 4][k / 16] >> 8 * (k % 4) & 0xFF;
            int first = BITS == 8 && FLIP == 0 ? static_cast<int>(a) : static_cast<int8_t>(a);
            c[i] += first * static_cast<int8_t>(b);
        }
    }
}

inline void multiply_add(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    using namespace emulator;
    int lane = current->thread.x % 32;
    const Operands& all = share_operands({a0, a1, a2, a3}, {b0, b1});
    int group = lane / 4, thread = lane % 4;
    for (int i = 0; i < 4; ++i) {
        int row = group + 8 * (i / 2), column = 2 * thread + i % 2;
        float sum = 0;
        for (int k = 0; k < 16; ++k) {
            // Use the PTX manual's layout: a register has two neighbors along K of a row.
            u32 a = all.a[row % 8 * 4 + k % 8 / 2][row / 8 + 2 * (k / 8)];
            u32 b = all.b[column * 4 + k % 8 / 2][k / 8];
            sum += of_16_bits(a >> 16 * (k % 2)) * of_16_bits(b >> 16 * (k % 2));
        }
        c[i] += sum;
    }
}

// Run a kernel, one block after another.
template <typename Kernel>
void run(Kernel kernel, int blocks, int batch, int shared_bytes) {
    using namespace emulator;
    static Kernel entry;
    entry = kernel;
    for (int at = 0; at < blocks * batch; ++at) {
        Block here;
        block = &here;
        here.fibers = std::vector<Fiber>(THREADS_OF_BLOCK);
        here.shared.assign(shared_bytes + 128, 0xFF);
        here.warps.resize(THREADS_OF_BLOCK / 32);
        here.operands.resize(2 * here.warps.size());
        here.values.resize(2 * here.warps.size());
        for (size_t i = 0; i < here.fibers.size(); ++i) {
            Fiber& fiber = here.fibers[i];
            fiber.warp = i / 32;
            fiber.thread.x = i;
            fiber.place.x = at % blocks;
            fiber.place.z = at / blocks;
            fiber.stack.reset(new char[65536]);
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.get();
            fiber.context.uc_stack.ss_size = 65536;
            fiber.context.uc_link = &scheduler;
            makecontext(&fiber.context, +[] { entry(); current->is_done = true; }, 0);
        }
        for (bool is_running = true; is_running;) {
            is_running = false;
            for (Fiber& fiber : here.fibers) {
                if (fiber.is_done) continue;
                is_running = true;
                if (fiber.waits_for && fiber.waits_for->round == fiber.waits_in) continue;
                fiber.waits_for = nullptr;
                current = &fiber;
                swapcontext(&scheduler, &fiber.context);
            }
        }
    }
}
