// Multiply a few rows of activations by a packed, quantized weight on an NVIDIA GPU.
//
// out[b, m, n] = sum over k of x[b, m, k] * W[b, k, n], where W is stored as codes and scales.
// K is the length of the contracted axis, and k is an index along it. One launch can multiply the
// same x by several weights, which differ only in N. Each block computes columns of one of them.
//
// With few rows, reading W takes most of the time. Therefore the kernel reads each byte of W once,
// keeps many bytes in flight, and needs about one integer instruction per code:
//
// - A warp computes 16 * MT columns of the result. It copies their codes with `cp.async` into its
//   own ring buffer in shared memory, which has STAGES stages. Warps do not wait for each other.
// - The lanes convert codes to bf16 or f16 in registers, as the first operand of the tensor core
//   instruction `mma.m16n8k16`. The second operand is the transposed activations. It takes NT
//   instructions of 8 rows each. The order of the terms of a sum is free, so a lane decodes codes
//   that are neighbors in memory.
// - With one or two rows (INTEGER), `mma` multiplies bytes, because codes become bytes in fewer
//   instructions. An activation becomes three 8-bit digits, each in a column of the second operand.
// - The accumulators of a tile are multiplied by its scales in f32. The WK warps of a block split
//   the contracted axis, and add their results through shared memory.
//
// `matmul.py` compiles this file with the macros of `matmul_config.py`:
//
//   M, K        the sizes of the products
//   SIZES       the N of each product, separated by commas
//   PRODUCTS    the number of products: 1 to 4
//   WHOLE       1: each N is a multiple of 16 * MT
//   ROWS        1: W is stored as [K, N]; 0: as [N, K]
//   BITS        the bits per code: 4 or 8
//   FORM        how codes are decoded: 0: consecutive integers, (code ^ FLIP) - LESS; 1: a table of
//               16 values, with their low bytes in LOW0 to LOW3 and high bytes in HIGH0 to HIGH3;
//               2: float8_e4m3fn; 3: float8_e5m2
//   NEGATIVE    1: 4-bit codes become negative floats before LESS is subtracted
//   ZERO        the dtype of zero points: 0 none, 1 int8, 2 uint8
//   TILE        the number of codes along K that share a scale and a zero point
//   SCALE       the dtype of scales: 0 f32, 1 bf16, 2 f16, 3 float8_e8m0fnu
//   ONE_SCALE   1: all columns share scales and zero points; 0: each has its own
//   F16         the dtype of x: 1 f16, 0 bf16
//   OUT         the dtype of the result: 0 f32, 1 bf16, 2 f16
//   MT          the number of tiles of 16 result columns per warp
//   NT          the number of tiles of 8 result rows per warp; if INTEGER, of 8 digit columns
//   WK          the number of warps per block
//   STAGES      the number of stages in the ring buffer of a warp
//   INTEGER     1: split activations into digits and multiply integers; 0: multiply bf16 or f16
//   KS          the number of 16-row groups of W per stage, if ROWS is 1
//   NAME        the name of the kernel

#if BITS == 4 && FLIP == 8 && LESS == 8 && ZERO == 0
#define IS_SIGNED_NIBBLE true
#else
#define IS_SIGNED_NIBBLE false
#endif

#ifdef __CUDACC_RTC__
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;
#define DEVICE __device__ __forceinline__

// Select four bytes of `a` (numbered 0 to 3) and `b` (numbered 4 to 7).
DEVICE u32 bytes_of(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }

DEVICE void copy_16_bytes(void* to, const void* from, bool is_inside) {
    u32 address = static_cast<u32>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address), "l"(from),
                 "r"(is_inside ? 16 : 0)
                 : "memory");
}

DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
DEVICE void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

#if F16
#define PAIR "f16"
#else
#define PAIR "bf16"
#endif

// Subtract a pair of 16-bit floats from another. The multiplication by -1 is exact.
DEVICE u32 difference(u32 a, u32 b) {
    u32 out;
    const u32 minus_one = F16 ? 0xBC00BC00u : 0xBF80BF80u;
    asm("fma.rn." PAIR "x2 %0, %1, %2, %3;" : "=r"(out) : "r"(b), "r"(minus_one), "r"(a));
    return out;
}

DEVICE void multiply_add(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." PAIR "." PAIR ".f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Add an int8 `mma` product to `c`. The first operand is unsigned if BITS is 8 and FLIP is 0.
DEVICE void multiply_add_bytes(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if BITS == 8 && FLIP == 0
#define BYTES "u8"
#else
#define BYTES "s8"
#endif
    asm("mma.sync.aligned.m16n8k32.row.col.s32." BYTES ".s8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Return the maximum of `value` over the lane's group of 16 lanes.
DEVICE u32 largest_of_16(u32 value) {
    for (int step = 1; step < 16; step *= 2)
        value = max(value, __shfl_xor_sync(~0u, value, step));
    return value;
}

// Return the maximum of the low halves and the maximum of the high halves.
DEVICE u32 larger_halves(u32 a, u32 b) { return __vmaxu2(a, b); }

// Make the compiler keep a branch, so that a rare case is not computed every time.
DEVICE void keep_branch() { asm volatile("" ::: "memory"); }

// Return the `value` of another lane.
template <typename T>
DEVICE T of_lane(T value, int lane) { return __shfl_sync(~0u, value, lane); }

// Return the `value` of the lane whose number differs in the bits of `mask`.
DEVICE int of_lane_xor(int value, int mask) { return __shfl_xor_sync(~0u, value, mask); }

// Add the four signed bytes of a word to `sum`.
DEVICE int add_signed_bytes(u32 word, int sum) {
    return __dp4a(static_cast<int>(word), 0x01010101, sum);
}

DEVICE u32 to_bits(float value) { return __float_as_uint(value); }

DEVICE float fused_multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }

// Convert the two float8 codes in the low half of `two` to a pair of 16-bit floats.
DEVICE u32 pair_of_float8(u32 two) {
    u32 halves;
#if FORM == 2
    asm("{.reg .b16 t; cvt.u16.u32 t, %1; cvt.rn.f16x2.e4m3x2 %0, t;}" : "=r"(halves) : "r"(two));
#else
    asm("{.reg .b16 t; cvt.u16.u32 t, %1; cvt.rn.f16x2.e5m2x2 %0, t;}" : "=r"(halves) : "r"(two));
#endif
#if F16
    return halves;
#else
    u32 out;
    asm("{.reg .b16 l, h; .reg .f32 a, b; mov.b32 {l, h}, %1; cvt.f32.f16 a, l; cvt.f32.f16 b, h;"
        " cvt.rn.bf16x2.f32 %0, b, a;}"
        : "=r"(out)
        : "r"(halves));
    return out;
#endif
}

DEVICE float from_f16(u16 bits) {
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(bits));
    return out;
}

DEVICE u16 to_16_bits(float value) {
    u16 out;
#if OUT == 2
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(value));
#else
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(value));
#endif
    return out;
}

DEVICE float from_bits(u32 bits) { return __uint_as_float(bits); }

// Return an integer as a pair of equal 16-bit floats.
DEVICE u32 pair_of_number(int number) {
    u32 out;
    float wide = static_cast<float>(number);
    asm("cvt.rn." PAIR "x2.f32 %0, %1, %1;" : "=r"(out) : "f"(wide));
    return out;
}

// Hide a constant from the compiler so that it stays in a register. Otherwise each three-operand
// logical instruction needs an extra copy. (gridDim.y is 1.)
DEVICE u32 opaque(u32 constant) { return constant + gridDim.y - 1; }

#define SHARED_ARRAY(name, bytes) __shared__ __align__(128) u8 name[bytes]

#else
#include "emulator.h"  // The tests define the same functions for a CPU.
#endif

// Derive sizes from the macros.

constexpr int THREADS = 32 * WK;
constexpr int WARP_N = 16 * MT;  // result columns per warp
constexpr int ROW_BYTES = WARP_N * BITS / 8;  // bytes per stored row and warp, if ROWS is 1
constexpr int UNIT = 128;  // codes along K that a warp processes per turn
constexpr int STAGE_K = ROWS ? 16 * KS : 512 / BITS;  // codes along K per stage
constexpr int STAGE_BYTES = ROWS ? 16 * KS * ROW_BYTES : 64 * WARP_N;
constexpr int STAGES_A_UNIT = UNIT / STAGE_K;
constexpr int UNITS = (K + UNIT - 1) / UNIT;
constexpr int WARP_STAGES = (UNITS + WK - 1) / WK * STAGES_A_UNIT;
constexpr int SUMS = MT * NT * 4;  // accumulators per lane
constexpr int RING_BYTES = WK * STAGES * STAGE_BYTES;
constexpr int PARTS_BYTES = (WK > 1 ? WK / 2 : 1) * SUMS * 128;
constexpr int DIGITS = 3;  // digits per activation, if INTEGER is 1
// Bytes per digit and row of x. The 32 bytes of padding avoid bank conflicts.
constexpr int DIGITS_STRIDE = UNIT + 32;
// Bytes per warp for the digits of x and the power of two of each row.
constexpr int X_BYTES = INTEGER ? DIGITS * M * DIGITS_STRIDE + (M * 4 + 15) / 16 * 16 : 0;
constexpr int X_ALL_BYTES = WK * X_BYTES;
constexpr int SHARED_BYTES = (RING_BYTES > PARTS_BYTES ? RING_BYTES : PARTS_BYTES) + X_ALL_BYTES;
constexpr bool IS_TILED = TILE < K;
constexpr int TILES = K / TILE;
constexpr int N_OF[PRODUCTS] = {SIZES};
constexpr bool N_IS_WHOLE = WHOLE;
constexpr bool K_IS_WHOLE = K % UNIT == 0 && UNITS % WK == 0;
// The bits of 1024 in f16, or 128 in bf16, twice. From there on, floats have a spacing of 1, so
// that an integer can be inserted into the low bits.
constexpr u32 ONE_BITS = F16 ? 0x64006400u : 0x43004300u;

typedef float Sums[MT][NT][4];

// Decode codes to pairs of 16-bit floats. The first float is in the low half of a word.
//
// `less` is a pair of equal floats, LESS plus the zero point. The decoders subtract it.

// Decode the low nibble of each half of a word. The other nibbles are ignored.
DEVICE u32 pair_of_nibbles(u32 halves, u32 less) {
    // Flip the sign bit of signed codes, so that codes and values have the same order.
    constexpr u32 SIGN = NEGATIVE ? 0x8000 : 0;
    u32 numbers = (halves & opaque(0x000F000Fu)) ^ (ONE_BITS | (SIGN | FLIP) * 0x00010001u);
    return difference(numbers, less);
}

// Decode the low byte of each half of a word. The high bytes must be zero.
DEVICE u32 pair_of_bytes(u32 halves, u32 less) {
#if FORM >= 2
    return pair_of_float8(bytes_of(halves, 0, 0x4420));
#elif F16
    return difference((halves ^ (FLIP * 0x00010001u)) | ONE_BITS, less);
#else
    // Convert the low seven bits and the eighth bit separately, because bf16 represents integers
    // exactly only up to 256. Both floats are biased by 128. The second one is 128, or 256 if the
    // eighth bit is set.
    u32 flipped = halves ^ ((FLIP ^ 0x80) * 0x00010001u);
    u32 number = difference((flipped & opaque(0x007F007Fu)) | ONE_BITS,
                            (flipped & opaque(0x00800080u)) | ONE_BITS);
    return ZERO || LESS != 0 ? difference(number, less) : number;
#endif
}

#if FORM == 1
// Look up four 4-bit codes in the table. Set `low` and `high` to the bytes of their values.
DEVICE void look_up(u32 nibbles, u32& low, u32& high) {
    u32 index = nibbles & 0x7777u;
    u32 is_upper = bytes_of(0x0000FF00u, 0, (nibbles >> 3) & 0x1111u);
    low = (bytes_of(LOW0, LOW1, index) & ~is_upper) | (bytes_of(LOW2, LOW3, index) & is_upper);
    high = (bytes_of(HIGH0, HIGH1, index) & ~is_upper) | (bytes_of(HIGH2, HIGH3, index) & is_upper);
}
#endif

// Decode eight 4-bit codes along K to four pairs.
DEVICE void decode_eight(u32 word, u32 less, u32 (&pairs)[4]) {
#if FORM == 1
    u32 low, high;
    look_up(word, low, high);
    pairs[0] = bytes_of(low, high, 0x5140);
    pairs[1] = bytes_of(low, high, 0x7362);
    look_up(word >> 16, low, high);
    pairs[2] = bytes_of(low, high, 0x5140);
    pairs[3] = bytes_of(low, high, 0x7362);
#else
    u32 second = word >> 4;
    pairs[0] = pair_of_nibbles(bytes_of(word, second, 0x0400), less);
    pairs[1] = pair_of_nibbles(bytes_of(word, second, 0x0501), less);
    pairs[2] = pair_of_nibbles(bytes_of(word, second, 0x0602), less);
    pairs[3] = pair_of_nibbles(bytes_of(word, second, 0x0703), less);
#endif
}

// Decode four 8-bit codes along K to two pairs.
DEVICE void decode_four(u32 word, u32 less, u32 (&pairs)[2]) {
    pairs[0] = pair_of_bytes(bytes_of(word, 0, 0x4140), less);
    pairs[1] = pair_of_bytes(bytes_of(word, 0, 0x4342), less);
}

// Hold a weight and its product.

#if SCALE == 0
typedef u32 Scale;
#elif SCALE == 3
typedef u8 Scale;
#else
typedef u16 Scale;
#endif

#if ZERO == 1
typedef signed char ZeroPoint;
#else
typedef u8 ZeroPoint;
#endif

struct Weight {
    const u8* codes;
    const Scale* scale;
    const ZeroPoint* zero_point;
    void* out;
    int size;  // N

    // Return N, which is a constant if there is one product.
    DEVICE int n() const { return PRODUCTS == 1 ? N_OF[0] : size; }
    DEVICE int scale_columns() const { return ONE_SCALE ? 1 : n(); }
};

// Load scales and zero points.

DEVICE float scale_of_bits(u32 bits) {
#if SCALE == 0
    return from_bits(bits);
#elif SCALE == 1
    return from_bits(bits << 16);
#elif SCALE == 2
    return from_f16(static_cast<u16>(bits));
#else
    return from_bits(bits == 0 ? 0x00400000u : bits == 255 ? 0x7FC00000u : bits << 23);
#endif
}

constexpr int LANE_COLUMNS = 2 * MT;  // result columns per lane
constexpr int SCALES_ALIGNMENT =
    LANE_COLUMNS * sizeof(Scale) < 16 ? LANE_COLUMNS * sizeof(Scale) : 16;

// Hold the scales of a lane's columns: two columns per tile of 16.
struct alignas(SCALES_ALIGNMENT) Scales { Scale of[MT][2]; };

// Return a result column of a lane, counted from the first column of its warp. `half` is 0 or 1.
DEVICE int column_of(int tile, int group, int half) {
    return ROWS ? group * LANE_COLUMNS + 2 * tile + half : tile * 16 + group + 8 * half;
}

// Return the index of the scale and zero point of a tile along K and a column. Columns beyond N
// get the index of the last column.
DEVICE int place_of(const Weight& w, int tile, int n) {
    int column = ONE_SCALE ? 0 : N_IS_WHOLE || n < w.n() ? n : w.n() - 1;
    return ROWS ? tile * w.scale_columns() + column : column * TILES + tile;
}

DEVICE Scales load_scales(const Weight& w, int tile, int n, int group) {
    if (!K_IS_WHOLE && tile >= TILES) tile = TILES - 1;
    if (ROWS && N_IS_WHOLE && !ONE_SCALE)
        return *reinterpret_cast<const Scales*>(w.scale + tile * w.n() + n + group * LANE_COLUMNS);
    Scales out;
    for (int i = 0; i < MT; ++i)
        for (int half = 0; half < 2; ++half)
            out.of[i][half] = w.scale[place_of(w, tile, n + column_of(i, group, half))];
    return out;
}

// Hold LESS plus the zero point for each column of a lane: a pair of equal floats, or an integer if
// INTEGER is 1.
#if INTEGER
struct Less { int of[MT][2]; };
#else
struct Less { u32 of[MT][2]; };
#endif

// The number to subtract from a code's byte, apart from the zero point. Bytes of 8-bit codes whose
// sign bit must be flipped are multiplied as signed bytes, which flips it.
constexpr int BYTE_LESS = IS_SIGNED_NIBBLE ? 0 : BITS == 8 ? LESS - FLIP : LESS;

DEVICE Less load_less(const Weight& w, int tile, int n, int group) {
    if (!K_IS_WHOLE && tile >= TILES) tile = TILES - 1;
    Less out;
    for (int i = 0; i < MT; ++i)
        for (int half = 0; half < 2; ++half) {
            int number = INTEGER ? BYTE_LESS : LESS;
            if (ZERO) number += w.zero_point[place_of(w, tile, n + column_of(i, group, half))];
            out.of[i][half] = INTEGER ? number : pair_of_number(number);
        }
    return out;
}

// Add the accumulators of a tile, times its scales, to `sums`. Set them to 0 for the next tile.
DEVICE void add_scaled(Sums& sums, Sums& part, const Scales& scales) {
    for (int i = 0; i < MT; ++i)
        for (int half = 0; half < 2; ++half) {
            float scale = scale_of_bits(scales.of[i][half]);
            for (int j = 0; j < NT; ++j)
                for (int c = 2 * half; c < 2 * half + 2; ++c) {
                    sums[i][j][c] += part[i][j][c] * scale;
                    part[i][j][c] = 0;
                }
        }
}

// Load activations.

struct alignas(16) Eight { u32 words[4]; };  // eight activations
struct alignas(8) Four { u32 words[2]; };    // four activations

// Load activations of row `row + 8 * tile` at index k, or zeros outside of the array. `x` points
// into `row`. `offset` is added to k in the bounds check.
template <typename Part>
DEVICE Part load_x(const u16* x, int tile, int row, int k, int offset = 0) {
    Part out = {};
    if (row + 8 * tile < M && (K_IS_WHOLE || k + offset < K))
        out = *reinterpret_cast<const Part*>(x + 8 * tile * K + k);
    return out;
}

// Iterate over the stages of a warp, and copy their codes into its ring buffer.

struct Stages {
    int k, last;  // the first k of the current stage, and the index of the stage in its unit

    DEVICE explicit Stages(int first_unit) : k(first_unit * UNIT), last(0) {}

    DEVICE void advance() {
        bool is_in_unit = STAGES_A_UNIT > 1 && ++last < STAGES_A_UNIT;
        if (!is_in_unit) last = 0;
        k += is_in_unit ? STAGE_K : (WK - 1) * UNIT + STAGE_K;
    }
};

struct Copies {
    Stages stages;
    const u8* from;  // the source of the lane's first 16 bytes, for k = 0
    u8* to;          // their destination in the first stage of the ring buffer
    // `slot` is the index of the next stage in the ring buffer. `row` is the lane's first stored
    // row, counted from the start of a stage if ROWS is 1, otherwise from the start of W.
    int slot, row;
    int size;  // N
    bool is_column_inside;

    DEVICE Copies(u8* ring, const Weight& w, int n, int first_unit, int lane)
        : stages(first_unit), slot(0), size(w.n()) {
        constexpr int PARTS = ROWS ? ROW_BYTES / 16 : 4;  // 16-byte parts per stored row
        row = lane / PARTS;
        int part = lane % PARTS;
        if (ROWS) {
            int column = n * BITS / 8 + part * 16;
            from = w.codes + static_cast<u64>(row) * (size * BITS / 8) + column;
            to = ring + part * 16;
            is_column_inside = N_IS_WHOLE || column < size * BITS / 8;
        } else {
            from = w.codes + static_cast<u64>(n + row) * (K * BITS / 8) + part * 16;
            // Permute the parts of each row, so that a warp reads from all banks.
            to = ring + row * 64 + (part ^ ((row >> 1) & 3)) * 16;
            row += n;
            is_column_inside = true;
        }
    }

    // Copy the next stage as one commit group.
    DEVICE void next(int lane) {
        u8* stage = to + slot * STAGE_BYTES;
        int k = stages.k;
        if (ROWS) {
            constexpr int COPIES = 16 * KS * ROW_BYTES / 512;  // copies per lane and stage
            constexpr int STEP = 512 / ROW_BYTES;  // rows between two copies of a lane
            for (int i = 0; i < COPIES; ++i) {
                int in_stage = row + i * STEP, r = in_stage % 16;
                // Reorder rows in groups of 16. A lane later reads four consecutive rows one by
                // one. In each read, four lanes then access neighboring places.
                int place = in_stage / 16 * 16 + r % 4 * 4 + r / 4;
                bool is_inside = is_column_inside && (K_IS_WHOLE || k + in_stage < K);
                const u8* source = from + static_cast<u64>(k + i * STEP) * (size * BITS / 8);
                copy_16_bytes(stage + place * ROW_BYTES, source, is_inside);
            }
        } else {
            int part_k = lane % 4 * (128 / BITS);
            for (int i = 0; i < 2 * MT; ++i) {
                bool is_inside = (N_IS_WHOLE || row + 8 * i < size) && (K_IS_WHOLE || k + part_k < K);
                const u8* source = from + k * BITS / 8 + static_cast<u64>(8 * i) * (K * BITS / 8);
                copy_16_bytes(stage + i * 512, source, is_inside);
            }
        }
        commit_copies();
        slot = slot + 1 == STAGES ? 0 : slot + 1;
        stages.advance();
    }
};

template <typename Word>
DEVICE Word read_shared(const u8* at) { return *reinterpret_cast<const Word*>(at); }

#if INTEGER

// Integer products for few rows. Converting codes to bytes takes fewer instructions than to bf16.
// Each group of 128 activations is scaled by a power of two and split into three base-256 digits.
// Each row of x therefore fills three columns of the second operand.

typedef int Parts[MT][NT][4];

// Convert the low nibbles of four bytes to bytes, from which `less` is not subtracted yet. High
// nibbles are ignored. Signed nibbles come back as their values multiplied by 16.
DEVICE u32 bytes_of_nibbles(u32 nibbles) {
    if (IS_SIGNED_NIBBLE) return (nibbles << 4) & opaque(0xF0F0F0F0u);
    return (nibbles & opaque(0x0F0F0F0Fu)) ^ (FLIP * 0x01010101u);
}

// Convert the high nibbles of four bytes in the same way.
DEVICE u32 bytes_of_high_nibbles(u32 nibbles) {
    if (IS_SIGNED_NIBBLE) return nibbles & opaque(0xF0F0F0F0u);
    return bytes_of_nibbles(nibbles >> 4);
}

// Return the bits of the largest magnitude of 8 activations. NaN is larger than any number.
DEVICE u32 largest_magnitude(const Eight& x) {
    u32 pairs[4];
    for (int i = 0; i < 4; ++i) pairs[i] = x.words[i] & 0x7FFF7FFFu;
    u32 pair = larger_halves(larger_halves(pairs[0], pairs[1]), larger_halves(pairs[2], pairs[3]));
    return larger_halves(pair, pair >> 16) & 0xFFFFu;
}

// Write the digits of the activations in `x`, and the power of two of each row.
DEVICE void write_digits(u8* digits, const Eight (&x)[(M + 1) / 2], int lane) {
    float* powers = reinterpret_cast<float*>(digits + DIGITS * M * DIGITS_STRIDE);
    for (int v = 0; v < (M + 1) / 2; ++v) {
        int row = 2 * v + lane / 16, group = lane % 16;
        u32 largest = largest_of_16(largest_magnitude(x[v]));
        u32 bits = F16 ? to_bits(from_f16(static_cast<u16>(largest))) : largest << 16;
        u32 exponent = bits >> 23 < 28 ? 28 : bits >> 23;
        float power = from_bits((274 - exponent) << 23);  // scales magnitudes to below 2^21
        u32 fields[8];
        for (int i = 0; i < 8; ++i) {
            u32 half = i % 2 ? x[v].words[i / 2] >> 16 : x[v].words[i / 2] & 0xFFFFu;
            float number = F16 ? from_f16(static_cast<u16>(half))
                               : from_bits(i % 2 ? x[v].words[i / 2] & 0xFFFF0000u : half << 16);
            // Adding 1.5 * 2^23 rounds to an integer in the low mantissa bits. Adding 0x8080 makes
            // the two low digits nonnegative.
            fields[i] = to_bits(fused_multiply_add(number, power, 12582912.0f + 32896.0f));
        }
        if (exponent == 255) {
            // Set all three digits to 1 or -1 for infinity and NaN, and to 0 for other activations.
            keep_branch();
            for (int i = 0; i < 8; ++i) {
                u32 half = x[v].words[i / 2] >> 16 * (i % 2) & 0xFFFFu;
                int sign = (half & 0x7FFFu) < (F16 ? 0x7C00u : 0x7F80u) ? 0 : half >> 15 ? -1 : 1;
                fields[i] = 0x4B400000u + 32896u + sign * 65793;
            }
        }
        if (row < M) {
            for (int digit = 0; digit < DIGITS; ++digit) {
                // If nibbles are stored along K, put even k into one word and odd k into the other.
                constexpr bool ARE_APART = BITS == 4 && !ROWS;
                u32 words[2];
                for (int i = 0; i < 2; ++i) {
                    int first = ARE_APART ? i : 4 * i, step = ARE_APART ? 2 : 1;
                    u32 select = digit | (digit + 4) << 4;
                    u32 low = bytes_of(fields[first], fields[first + step], select);
                    u32 high = bytes_of(fields[first + 2 * step], fields[first + 3 * step], select);
                    u32 four =
                        bytes_of(low, high, 0x5410) ^ (digit < 2 ? 0x80808080u : 0x40404040u);
                    words[i] = digit < 2 ? four : four | (four & 0x40404040u) << 1;
                }
                u8* at = digits + (DIGITS * row + digit) * DIGITS_STRIDE + 8 * group;
                *reinterpret_cast<Four*>(at) = Four{{words[0], words[1]}};
            }
            u32 last = (exponent - 20 - (IS_SIGNED_NIBBLE ? 4 : 0)) << 23;
            if (exponent == 255) last = bits;  // infinity or NaN
            if (group == 0) powers[row] = from_bits(last);
        }
    }
}

// Load the second operand: a lane's digits of 32 activations, or zeros beyond the last column.
DEVICE void read_digits(u32 (&b)[NT][2], const u8* digits, int k, int group, int thread) {
    for (int j = 0; j < NT; ++j) {
        int column = 8 * j + group;
        const u8* at = digits + column * DIGITS_STRIDE + k;
        bool is_there = column < DIGITS * M;
        constexpr bool ARE_APART = BITS == 4 && !ROWS;
        int first = ARE_APART ? 8 * thread : 4 * thread, second = first + (ARE_APART ? 4 : 16);
        b[j][0] = is_there ? *reinterpret_cast<const u32*>(at + first) : 0;
        b[j][1] = is_there ? *reinterpret_cast<const u32*>(at + second) : 0;
    }
}

#if ROWS

// Hold the codes of a stored row that belong to a lane's columns.
struct alignas(MT * BITS / 4) GroupWords { u32 words[MT * BITS / 16]; };

// Transpose a 4 x 4 matrix of bytes.
DEVICE void transpose(const u32 (&words)[4], u32 (&out)[4]) {
    u32 low01 = bytes_of(words[0], words[1], 0x5140), low23 = bytes_of(words[2], words[3], 0x5140);
    u32 high01 = bytes_of(words[0], words[1], 0x7362),
        high23 = bytes_of(words[2], words[3], 0x7362);
    out[0] = bytes_of(low01, low23, 0x5410);
    out[1] = bytes_of(low01, low23, 0x7632);
    out[2] = bytes_of(high01, high23, 0x5410);
    out[3] = bytes_of(high01, high23, 0x7632);
}

// Add the product of 32 stored rows to `part`. `from` points to the first of them.
DEVICE void multiply_bytes(Parts& part, const u8* from, const u32 (&b)[NT][2], int group,
                           int thread) {
    GroupWords row[8];
    for (int i = 0; i < 8; ++i)
        row[i] = *reinterpret_cast<const GroupWords*>(
            from + (i / 4 * 16 + i % 4 * 4 + thread) * ROW_BYTES + group * sizeof(GroupWords));
    for (int word = 0; word < MT * BITS / 16; ++word) {
        u32 turned[2][4];  // for each 16 rows: word i has byte i of four rows
        for (int half = 0; half < 2; ++half) {
            u32 words[4];
            for (int i = 0; i < 4; ++i) words[i] = row[4 * half + i].words[word];
            transpose(words, turned[half]);
        }
        for (int byte = 0; byte < 4; byte += BITS / 4) {
            int i = BITS == 4 ? 4 * word + byte : 2 * word + byte / 2;
            u32 a[4];
            for (int half = 0; half < 2; ++half) {
#if BITS == 4
                a[2 * half] = bytes_of_nibbles(turned[half][byte]);
                a[2 * half + 1] = bytes_of_high_nibbles(turned[half][byte]);
#else
                a[2 * half] = turned[half][byte];
                a[2 * half + 1] = turned[half][byte + 1];
#endif
            }
            for (int j = 0; j < NT; ++j)
                multiply_add_bytes(part[i][j], a[0], a[1], a[2], a[3], b[j][0], b[j][1]);
        }
    }
}

#else

// Add the product of 32 codes along K to `part`. `from` points to a stage, and `step` is the index
// of the codes in it.
DEVICE void multiply_bytes(Parts& part, const u8* from, int step, const u32 (&b)[NT][2], int group,
                           int thread) {
    for (int i = 0; i < MT; ++i) {
        u32 a[4];
        for (int half = 0; half < 2; ++half) {
            int row = i * 16 + 8 * half + group, turn = (row >> 1) & 3;
            const u8* at = from + row * 64 + thread * 4;
#if BITS == 4
            u32 word = *reinterpret_cast<const u32*>(at + (step ^ turn) * 16);
            a[half] = bytes_of_nibbles(word);
            a[2 + half] = bytes_of_high_nibbles(word);
#else
            a[half] = *reinterpret_cast<const u32*>(at + ((2 * step) ^ turn) * 16);
            a[2 + half] = *reinterpret_cast<const u32*>(at + ((2 * step + 1) ^ turn) * 16);
#endif
        }
        for (int j = 0; j < NT; ++j)
            multiply_add_bytes(part[i][j], a[0], a[1], a[2], a[3], b[j][0], b[j][1]);
    }
}

#endif

// Whether something is subtracted from the bytes of codes. It is subtracted from a tile's products
// as `less` times the sum of the digits: exactly, for all codes and zero points.
constexpr bool SUBTRACTS = ZERO || BYTE_LESS != 0;

// Add the digits in a lane's registers to the lane's sum for each tile of 8 digit columns.
DEVICE void sum_digits(int (&digit_sums)[NT], const u32 (&b)[NT][2]) {
    for (int j = 0; j < NT; ++j)
        for (int i = 0; i < 2; ++i) digit_sums[j] = add_signed_bytes(b[j][i], digit_sums[j]);
}

// Subtract `less` times the sums of the digits from `part`. Set the sums to 0.
DEVICE void subtract_less(Parts& part, int (&digit_sums)[NT], const Less& less, int thread) {
    for (int j = 0; j < NT; ++j) {
        int sum = digit_sums[j];  // of a quarter of the digits in column 8 * j + lane / 4
        for (int step = 1; step < 4; step *= 2) sum += of_lane_xor(sum, step);
        for (int c = 0; c < 2; ++c) {
            int column_sum = of_lane(sum, 4 * (2 * thread + c));
            for (int i = 0; i < MT; ++i)
                for (int half = 0; half < 2; ++half)
                    part[i][j][2 * half + c] -= less.of[i][half] * column_sum;
        }
        digit_sums[j] = 0;
    }
}

// Add `part`, times the powers of two and the scales, to `sums`. Set `part` to 0.
DEVICE void add_digits(Sums& sums, Parts& part, const float* powers, const Scales& scales,
                       int thread) {
    float factors[NT][2];
    for (int j = 0; j < NT; ++j)
        for (int c = 0; c < 2; ++c) {
            int column = 8 * j + 2 * thread + c, digit = column % DIGITS;
            float power = column < DIGITS * M ? powers[column / DIGITS] : 0;
            factors[j][c] = power * (digit == 0 ? 1.0f : digit == 1 ? 256.0f : 65536.0f);
        }
    for (int i = 0; i < MT; ++i)
        for (int half = 0; half < 2; ++half) {
            float scale = IS_TILED ? scale_of_bits(scales.of[i][half]) : 1.0f;
            for (int j = 0; j < NT; ++j)
                for (int c = 0; c < 2; ++c) {
                    float number = static_cast<float>(part[i][j][2 * half + c]) * factors[j][c];
                    sums[i][j][2 * half + c] += number * scale;
                    part[i][j][2 * half + c] = 0;
                }
        }
}

// Accumulate this warp's share of the contracted axis into `sums`.
DEVICE void sum_over_k(Sums& sums, u8* ring, u8* digits, const u16* x, const Weight& w, int n,
                       int first_unit, int lane) {
    int group = lane / 4, thread = lane % 4;
    Copies copies(ring, w, n, first_unit, lane);
    for (int s = 0; s < STAGES - 1; ++s)
        if (s < WARP_STAGES) copies.next(lane);
        else commit_copies();
    x += lane % 16 * 8;
    Eight xs[(M + 1) / 2];
    for (int v = 0; v < (M + 1) / 2; ++v) {
        int row = 2 * v + lane / 16, k = first_unit * UNIT;
        xs[v] = load_x<Eight>(x + static_cast<u64>(row) * K, 0, row, k, lane % 16 * 8);
    }
    const float* powers = reinterpret_cast<const float*>(digits + DIGITS * M * DIGITS_STRIDE);
    Stages stages(first_unit);
    Parts part = {};
    int digit_sums[NT] = {};
    Scales scales = {};
    Less less = load_less(w, 0, n, group);
    int slot = 0;
#pragma unroll 1
    for (int s = 0; s < WARP_STAGES; ++s) {
        int k = stages.k;
        if (k % UNIT == 0) {
            __syncwarp();
            write_digits(digits, xs, lane);
            for (int v = 0; v < (M + 1) / 2; ++v) {
                int row = 2 * v + lane / 16;
                if (k + WK * UNIT < K)
                    xs[v] = load_x<Eight>(x + static_cast<u64>(row) * K, 0, row, k + WK * UNIT,
                                          lane % 16 * 8);
                else xs[v] = Eight{};
            }
        }
        if (IS_TILED && (k % TILE == 0 || k % UNIT == 0))
            scales = load_scales(w, k / TILE, n, group);
        if (ZERO && (k % TILE == 0 || k % UNIT == 0))
            less = load_less(w, IS_TILED ? k / TILE : 0, n, group);
        wait_for_copies<STAGES - 2>();
        __syncwarp();
        if (s + STAGES - 1 < WARP_STAGES) copies.next(lane);
        else commit_copies();
        const u8* here = ring + slot * STAGE_BYTES;
        for (int step = 0; step < STAGE_K / 32; ++step) {
            int at = k + 32 * step;
            if (step > 0 && IS_TILED && at % TILE == 0) {
                scales = load_scales(w, at / TILE, n, group);
                if (ZERO) less = load_less(w, at / TILE, n, group);
            }
            u32 b[NT][2];
            read_digits(b, digits, at % UNIT, group, thread);
            if (SUBTRACTS) sum_digits(digit_sums, b);
#if ROWS
            multiply_bytes(part, here + step * 32 * ROW_BYTES, b, group, thread);
#else
            multiply_bytes(part, here, step, b, group, thread);
#endif
            bool is_last = (IS_TILED && (at + 32) % TILE == 0) || (at + 32) % UNIT == 0;
            if (is_last && SUBTRACTS) subtract_less(part, digit_sums, less, thread);
            if (is_last) add_digits(sums, part, powers, scales, thread);
        }
        slot = slot + 1 == STAGES ? 0 : slot + 1;
        stages.advance();
    }
}

#elif ROWS

// Hold the codes of a stored row that belong to a lane's columns.
struct alignas(MT * BITS / 4) GroupWords { u32 words[MT * BITS / 16]; };

// Add the product of 16 stored rows to `part`. `from` points to the first of them.
DEVICE void multiply_step(Sums& part, const u8* from, const Four (&x)[NT], const Less& less,
                          int group, int thread) {
    GroupWords row[4];
    for (int i = 0; i < 4; ++i)
        row[i] = read_shared<GroupWords>(from + (i * 4 + thread) * ROW_BYTES +
                                         group * sizeof(GroupWords));
    for (int i = 0; i < MT; ++i) {
        // Decode the first operand: rows 0 and 1 of two neighboring columns, then rows 2 and 3.
        u32 a[4];
        for (int two = 0; two < 2; ++two) {
#if BITS == 4
            u32 first = row[2 * two].words[i / 4], second = row[2 * two + 1].words[i / 4];
            u32 halves = bytes_of(first, second, i % 4 | (4 + i % 4) << 8);
#if FORM == 1
            // Put the nibbles of both columns in the first row before those in the second row.
            u32 low, high;
            look_up((halves & 0xFFu) | (halves >> 8 & 0xFF00u), low, high);
            a[2 * two] = bytes_of(low, high, 0x6240);
            a[2 * two + 1] = bytes_of(low, high, 0x7351);
#else
            a[2 * two] = pair_of_nibbles(halves, less.of[i][0]);
            a[2 * two + 1] = pair_of_nibbles(halves >> 4, less.of[i][1]);
#endif
#else
            u32 first = row[2 * two].words[i / 2], second = row[2 * two + 1].words[i / 2];
            int byte = 2 * (i % 2);
            u32 four = bytes_of(first, second,
                                byte | (byte + 1) << 4 | (byte + 4) << 8 | (byte + 5) << 12);
            a[2 * two] = pair_of_bytes(bytes_of(four, 0, 0x4240), less.of[i][0]);
            a[2 * two + 1] = pair_of_bytes(bytes_of(four, 0, 0x4341), less.of[i][1]);
#endif
        }
        for (int j = 0; j < NT; ++j)
            multiply_add(part[i][j], a[0], a[1], a[2], a[3], x[j].words[0], x[j].words[1]);
    }
}

// Accumulate this warp's share of the contracted axis into `sums`.
DEVICE void sum_over_k(Sums& sums, u8* ring, const u16* x, const Weight& w, int m, int n,
                       int first_unit, int lane) {
    int group = lane / 4, thread = lane % 4;
    Copies copies(ring, w, n, first_unit, lane);
    for (int s = 0; s < STAGES - 1; ++s)
        if (s < WARP_STAGES) copies.next(lane);
        else commit_copies();
    x += static_cast<u64>(m + group) * K + 4 * thread;
    Stages stages(first_unit);
    Sums part = {};
    Scales scales = {};
    Less less = load_less(w, 0, n, group);
    int slot = 0;
#pragma unroll 1
    for (int s = 0; s < WARP_STAGES; ++s) {
        int k = stages.k;
        Four xs[KS][NT];
        for (int step = 0; step < KS; ++step)
            for (int j = 0; j < NT; ++j) xs[step][j] = load_x<Four>(x, j, m + group, k + 16 * step);
        wait_for_copies<STAGES - 2>();
        __syncwarp();
        if (s + STAGES - 1 < WARP_STAGES) copies.next(lane);
        else commit_copies();
        const u8* here = ring + slot * STAGE_BYTES;
        for (int step = 0; step < KS; ++step) {
            int at = k + 16 * step;
            bool is_first = at % TILE == 0 || at % UNIT == 0;
            bool is_last = (at + 16) % TILE == 0 || (at + 16) % UNIT == 0;
            if (IS_TILED && is_first) {
                scales = load_scales(w, at / TILE, n, group);
                if (ZERO) less = load_less(w, at / TILE, n, group);
            }
            multiply_step(IS_TILED ? part : sums, here + step * 16 * ROW_BYTES, xs[step], less,
                          group, thread);
            if (IS_TILED && is_last) add_scaled(sums, part, scales);
        }
        slot = slot + 1 == STAGES ? 0 : slot + 1;
        stages.advance();
    }
}

#else

constexpr int WORDS = 4;            // 32-bit words per lane, stored row and stage
constexpr int WORD_K = 128 / BITS;  // codes along K in one word of each of four lanes
constexpr int STAGE_TILES = TILE < STAGE_K ? STAGE_K / TILE : 1;
#if BITS == 4
typedef Eight WordX;
#else
typedef Four WordX;
#endif

// Add the product of WORD_K codes along K to `part`. `word` is their index in the stage.
DEVICE void multiply_word(Sums& part, const u8* from, int word, const WordX (&x)[NT],
                          const Less& less, int group, int thread) {
    for (int i = 0; i < MT; ++i) {
        u32 words[2];
        for (int half = 0; half < 2; ++half) {
            int row = i * 16 + 8 * half + group;
            int place = word ^ ((row >> 1) & 3);
            words[half] = read_shared<u32>(from + row * 64 + place * 16 + thread * 4);
        }
#if BITS == 4
        u32 upper[4], lower[4];
        decode_eight(words[0], less.of[i][0], upper);
        decode_eight(words[1], less.of[i][1], lower);
        for (int j = 0; j < NT; ++j) {
            multiply_add(part[i][j], upper[0], lower[0], upper[1], lower[1], x[j].words[0],
                         x[j].words[1]);
            multiply_add(part[i][j], upper[2], lower[2], upper[3], lower[3], x[j].words[2],
                         x[j].words[3]);
        }
#else
        u32 upper[2], lower[2];
        decode_four(words[0], less.of[i][0], upper);
        decode_four(words[1], less.of[i][1], lower);
        for (int j = 0; j < NT; ++j)
            multiply_add(part[i][j], upper[0], lower[0], upper[1], lower[1], x[j].words[0],
                         x[j].words[1]);
#endif
    }
}

// Accumulate this warp's share of the contracted axis into `sums`.
DEVICE void sum_over_k(Sums& sums, u8* ring, const u16* x, const Weight& w, int m, int n,
                       int first_unit, int lane) {
    int group = lane / 4, thread = lane % 4;
    Copies copies(ring, w, n, first_unit, lane);
    for (int s = 0; s < STAGES - 1; ++s)
        if (s < WARP_STAGES) copies.next(lane);
        else commit_copies();
    x += static_cast<u64>(m + group) * K;
    Stages stages(first_unit);
    Sums part = {};
    int slot = 0;
#pragma unroll 1
    for (int s = 0; s < WARP_STAGES; ++s) {
        int k = stages.k;
        WordX xs[WORDS][NT];
        for (int word = 0; word < WORDS; ++word)
            for (int j = 0; j < NT; ++j)
                xs[word][j] =
                    load_x<WordX>(x, j, m + group, k + WORD_K * word + WORD_K / 4 * thread);
        Scales scales[STAGE_TILES];
        Less less[STAGE_TILES];
        for (int tile = 0; tile < STAGE_TILES; ++tile) {
            if (IS_TILED) scales[tile] = load_scales(w, k / TILE + tile, n, group);
            less[tile] = load_less(w, IS_TILED ? k / TILE + tile : 0, n, group);
        }
        wait_for_copies<STAGES - 2>();
        __syncwarp();
        if (s + STAGES - 1 < WARP_STAGES) copies.next(lane);
        else commit_copies();
        const u8* here = ring + slot * STAGE_BYTES;
        for (int word = 0; word < WORDS; ++word) {
            int tile = word * WORD_K / TILE % STAGE_TILES;
            multiply_word(IS_TILED ? part : sums, here, word, xs[word], less[tile], group, thread);
            if (IS_TILED && ((word + 1) * WORD_K % TILE == 0 || word + 1 == WORDS))
                add_scaled(sums, part, scales[tile]);
        }
        slot = slot + 1 == STAGES ? 0 : slot + 1;
        stages.advance();
    }
}

#endif

DEVICE void store(void* out, u64 at, float value) {
#if OUT == 0
    static_cast<float*>(out)[at] = value;
#else
    static_cast<u16*>(out)[at] = to_16_bits(value);
#endif
}

#if PRODUCTS == 1
#define EACH(F) F(0)
#elif PRODUCTS == 2
#define EACH(F) F(0) F(1)
#elif PRODUCTS == 3
#define EACH(F) F(0) F(1) F(2)
#else
#define EACH(F) F(0) F(1) F(2) F(3)
#endif

// Declare the parameters for a weight, in the order of the operands that `matmul.py` passes.
#if ZERO
#define WEIGHT(i) , const u8 *codes##i, const Scale *scale##i, const ZeroPoint *zero_point##i
#define ZERO_POINT(i) zero_point##i
#else
#define WEIGHT(i) , const u8 *codes##i, const Scale *scale##i
#define ZERO_POINT(i) nullptr
#endif
#define RESULT(i) , void *out##i

// Take the next weight, unless `block` is already among the blocks of `w`.
#define CHOOSE(i)                                                                 \
    if (!is_chosen) {                                                             \
        constexpr int BLOCKS = (N_OF[i] + WARP_N - 1) / WARP_N;                   \
        w = Weight{codes##i, scale##i, ZERO_POINT(i), out##i, N_OF[i]};           \
        is_chosen = i + 1 == PRODUCTS || block < BLOCKS;                          \
        if (!is_chosen) block -= BLOCKS;                                          \
    }

extern "C" __global__ void __launch_bounds__(THREADS)
    NAME(const u16* x EACH(WEIGHT) EACH(RESULT)) {
    SHARED_ARRAY(shared, SHARED_BYTES);
    float* parts = reinterpret_cast<float*>(shared + X_ALL_BYTES);
    constexpr int ROW_BLOCKS = INTEGER ? 1 : (M + 8 * NT - 1) / (8 * NT);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int m = blockIdx.x % ROW_BLOCKS * 8 * NT;
    int block = blockIdx.x / ROW_BLOCKS;
    Weight w;
    bool is_chosen = false;
    EACH(CHOOSE)
    int n = block * WARP_N;
    int b = blockIdx.z;
    x += static_cast<u64>(b) * M * K;
    w.codes += static_cast<u64>(b) * (static_cast<u64>(K) * w.n() * BITS / 8);
    w.scale += static_cast<u64>(b) * TILES * w.scale_columns();
    if (ZERO) w.zero_point += static_cast<u64>(b) * TILES * w.scale_columns();

    Sums sums = {};
    u8* ring = shared + X_ALL_BYTES + warp * STAGES * STAGE_BYTES;
#if INTEGER
    sum_over_k(sums, ring, shared + warp * X_BYTES, x, w, n, warp, lane);
#else
    sum_over_k(sums, ring, x, w, m, n, warp, lane);
#endif

    // Reduce the accumulators of all warps into the first warp. In each round, half of the warps
    // add the accumulators of the other half.
    float* flat = &sums[0][0][0];
    for (int half = WK / 2; half > 0; half /= 2) {
        __syncthreads();
        float* mine = parts + warp % half * SUMS * 32 + lane;
        if (warp >= half && warp < 2 * half)
            for (int i = 0; i < SUMS; ++i) mine[i * 32] = flat[i];
        __syncthreads();
        if (warp < half)
            for (int i = 0; i < SUMS; ++i) flat[i] += mine[i * 32];
    }
    if (warp > 0) return;

    int group = lane / 4, thread = lane % 4;
#if INTEGER
    float rows[MT][2][M];  // per row of x, the sum over its three digits
    for (int i = 0; i < MT; ++i)
        for (int half = 0; half < 2; ++half)
            for (int row = 0; row < M; ++row) {
                rows[i][half][row] = 0;
                for (int c = DIGITS * row + DIGITS - 1; c >= DIGITS * row; --c)
                    rows[i][half][row] +=
                        of_lane(sums[i][c / 8][2 * half + c % 2], group * 4 + c % 8 / 2);
            }
#endif
    for (int i = 0; i < MT; ++i)
        for (int half = 0; half < 2; ++half) {
            int column = n + column_of(i, group, half);
            if (column >= w.n()) continue;
            float last = IS_TILED ? 1.0f : scale_of_bits(w.scale[place_of(w, 0, column)]);
#if INTEGER
            for (int row = 0; row < M; ++row)
                if (thread == row % 4)
                    store(w.out, (static_cast<u64>(b) * M + row) * w.n() + column,
                          rows[i][half][row] * last);
#else
            for (int j = 0; j < NT; ++j)
                for (int c = 0; c < 2; ++c) {
                    int row = m + 8 * j + 2 * thread + c;
                    u64 at = (static_cast<u64>(b) * M + row) * w.n() + column;
                    if (row < M) store(w.out, at, sums[i][j][2 * half + c] * last);
                }
#endif
        }
}
