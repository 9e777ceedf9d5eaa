/* Encodes rows by the span of each and decodes records, every row in one go: what grid.py and rowwise.py do with numpy,
 * to the same bits.
 *
 * It must not know fields, packs or Python. Operations, their order and their precision are those of grid.py and of
 * rowwise.py; whoever changes one changes the other. A change of the arguments takes another name, since an older build
 * may lie beside newer Python.
 */

#include <float.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__FAST_MATH__) || FLT_EVAL_METHOD != 0
#error "needs float32 arithmetic as it is written"
#endif

/* A second build of the loop with AVX2, picked when the library is loaded. Its results are the same. */
#if !defined(FOR_EACH_PROCESSOR) && defined(__has_attribute)
#if __has_attribute(target_clones) && defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx2", "default")))
#endif
#endif
#ifndef FOR_EACH_PROCESSOR
#define FOR_EACH_PROCESSOR
#endif

enum { HEADER_BYTES = 4, CONSTANT_START = 2, CONSTANT_STOP = 6, STEP_SHIFT = 14, MOST_STEP = 0xFFFF, PIECE = 256, BATCH = 16 };

static const uint32_t LEAST_STEP = UINT32_C(31) << 23;
static const float MOST_OFFSET = 32767.0f;
/* 1.5 x 2^23: a float32 number below 2^22 that is added to it is rounded as rint rounds, into the lowest bits. */
static const float ROUNDING = 12582912.0f;

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Beyond 2^22, where it is off, a number stays beyond all that a record can hold. */
static inline float rounded(float value) { return (value + ROUNDING) - ROUNDING; }

struct ends {
    float lowest, highest;
};

/* As _ends in grid.py: by the bits as integers. */
static inline struct ends ends_of(const uint32_t *restrict row, size_t width) {
    int32_t highest = INT32_MIN;
    uint32_t lowest = 0;
    for (size_t i = 0; i < width; i++) {
        const int32_t element = (int32_t)row[i];
        highest = element > highest ? element : highest;
        lowest = row[i] > lowest ? row[i] : lowest;
    }
    if ((highest ^ (int32_t)lowest) >= 0) {
        uint32_t nearest_zero = UINT32_MAX;
        for (size_t i = 0; i < width; i++) nearest_zero = row[i] < nearest_zero ? row[i] : nearest_zero;
        if ((int32_t)nearest_zero >= 0)
            lowest = nearest_zero;
        else
            highest = (int32_t)nearest_zero;
    }
    return (struct ends){float_of(lowest), float_of((uint32_t)highest)};
}

static inline void codes_of(const uint32_t *restrict row, size_t count, float per_step, float offset, float most,
                            uint8_t *restrict codes) {
    for (size_t i = 0; i < count; i++) {
        const float place = float_of(row[i]) * per_step - offset;
        codes[i] = (uint8_t)bits_of((place < most ? place : most) + ROUNDING);
    }
}

static inline void pairs_of(const uint32_t *restrict row, size_t count, float per_step, float offset, float most,
                            uint8_t *restrict pairs) {
    uint8_t codes[PIECE + 1];
    for (size_t start = 0; start < count; start += PIECE) {
        const size_t left = count - start < PIECE ? count - start : PIECE;
        codes_of(row + start, left, per_step, offset, most, codes);
        codes[left] = 0;
        for (size_t i = 0; i < (left + 1) / 2; i++)
            pairs[start / 2 + i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
    }
}

/* By row: what its record begins with, and by what its codes are found. */
struct grids {
    float lowest[BATCH], highest[BATCH], per_step[BATCH], offset[BATCH];
    uint32_t header[BATCH];
    int32_t usable[BATCH], constant[BATCH];
};

/* As _spanning, _grid and _usable in grid.py. Always of a whole batch, so that it is done with vectors. */
static inline void find_grids(struct grids *grids, float most, float unit) {
    for (size_t i = 0; i < BATCH; i++) {
        const float lowest = grids->lowest[i], highest = grids->highest[i], span = highest - lowest;
        const uint32_t step_bits = bits_of(span / most) + (UINT32_C(1) << (STEP_SHIFT - 1));
        const int32_t step_code = (int32_t)(step_bits - LEAST_STEP) >> STEP_SHIFT;
        const float step = float_of(step_bits >> STEP_SHIFT << STEP_SHIFT);
        const float offset_code = rounded(lowest / (step * unit));
        const float per_step = 1 / step, offset = offset_code * unit;
        const float first = lowest * per_step - offset, last = highest * per_step - offset;
        grids->per_step[i] = per_step;
        grids->offset[i] = offset;
        /* Each of these is false where there is a NaN. */
        grids->usable[i] = (step_code > 0) & (step_code <= MOST_STEP) & (offset_code <= MOST_OFFSET) &
                           (offset_code >= -MOST_OFFSET) & (first <= 0.5f) & (last > most - 0.5f);
        grids->constant[i] = span == 0;
        /* The lowest 16 bits of ROUNDING are 0: they become those of the whole number that is added. */
        grids->header[i] = ((uint32_t)step_code & 0xFFFF) | bits_of(offset_code + ROUNDING) << 16;
    }
}

/* values: float32 [count, width]; bits: 8 or 4; records: [count, 4 + bytes of the codes]; held: 0 or 1 for each row. */
FOR_EACH_PROCESSOR
void encode_spans(const uint32_t *restrict values, size_t count, size_t width, unsigned bits,
                  uint8_t *restrict records, uint8_t *restrict held) {
    const size_t record_bytes = HEADER_BYTES + (bits == 8 ? width : (width + 1) / 2);
    const float most = bits == 8 ? 255.0f : 15.0f, unit = bits == 8 ? 0.5f : 0.03125f;
    struct grids grids = {0};
    for (size_t start = 0; start < count; start += BATCH) {
        const size_t left = count - start < BATCH ? count - start : BATCH;
        for (size_t i = 0; i < left; i++) {
            const struct ends ends = ends_of(values + (start + i) * width, width);
            grids.lowest[i] = ends.lowest;
            grids.highest[i] = ends.highest;
        }
        find_grids(&grids, most, unit);
        for (size_t i = 0; i < left; i++) {
            const uint32_t *row = values + (start + i) * width;
            uint8_t *record = records + (start + i) * record_bytes, *payload = record + HEADER_BYTES;
            const int constant = grids.constant[i] && record_bytes >= CONSTANT_STOP;
            held[start + i] = constant || grids.usable[i];
            if (constant || !grids.usable[i]) {
                memset(record, 0, record_bytes);
                if (constant) memcpy(record + CONSTANT_START, row, sizeof *row);
                continue;
            }
            memcpy(record, &grids.header[i], HEADER_BYTES);
            if (bits == 8)
                codes_of(row, width, grids.per_step[i], grids.offset[i], most, payload);
            else
                pairs_of(row, width, grids.per_step[i], grids.offset[i], most, payload);
        }
    }
}

/* Eight codes, one after the other, to a byte each: halves, quarters and eighths move apart. */
static inline uint64_t spread(uint64_t codes, unsigned bits) {
    const uint64_t four = (UINT64_C(1) << 4 * bits) - 1;
    const uint64_t two = ((UINT64_C(1) << 2 * bits) - 1) * UINT64_C(0x0000000100000001);
    const uint64_t one = ((UINT64_C(1) << bits) - 1) * UINT64_C(0x0001000100010001);
    codes = (codes & four) | (codes >> 4 * bits) << 32;
    codes = (codes & two) | (codes >> 2 * bits & two) << 16;
    return (codes & one) | (codes >> bits & one) << 8;
}

static inline void unpack_eight(const uint8_t *restrict packed, size_t bytes, unsigned bits, uint8_t *restrict codes) {
    uint64_t group = 0;
    for (size_t i = 0; i < bytes; i++) group |= (uint64_t)packed[i] << 8 * i;
    group = spread(group, bits);
    memcpy(codes, &group, sizeof group);
}

/* As unpack in bits.py. codes has room for whole groups of eight. */
static inline void unpack(const uint8_t *restrict packed, size_t count, unsigned bits, uint8_t *restrict codes) {
    size_t i = 0;
    for (; i + 8 <= count; i += 8, packed += bits) unpack_eight(packed, bits, bits, codes + i);
    if (i < count) unpack_eight(packed, ((count - i) * bits + 7) / 8, bits, codes + i);
}

static inline void values_of(const uint8_t *restrict codes, size_t count, float step, float offset,
                             uint32_t *restrict row) {
    for (size_t i = 0; i < count; i++) row[i] = bits_of(((float)codes[i] + offset) * step);
}

static inline void unpacked_values_of(const uint8_t *restrict packed, size_t count, unsigned bits, float step,
                                      float offset, uint32_t *restrict row) {
    uint8_t codes[PIECE];
    for (size_t start = 0; start < count; start += PIECE) {
        const size_t left = count - start < PIECE ? count - start : PIECE;
        unpack(packed + start / 8 * bits, left, bits, codes);
        values_of(codes, left, step, offset, row + start);
    }
}

/* As _decode_block in rowwise.py, whatever the bytes are.
 * records: [count, 4 + bytes of the codes]; bits: 8, 4, 3 or 2; values: float32 [count, width]. */
FOR_EACH_PROCESSOR
void decode_records(const uint8_t *restrict records, size_t count, size_t width, unsigned bits,
                    uint32_t *restrict values) {
    const size_t record_bytes = HEADER_BYTES + (width * bits + 7) / 8;
    const float unit = (float)(1 << bits) / 512;
    for (size_t i = 0; i < count; i++) {
        const uint8_t *record = records + i * record_bytes, *payload = record + HEADER_BYTES;
        uint32_t *row = values + i * width;
        uint16_t step_code;
        int16_t offset_code;
        memcpy(&step_code, record, sizeof step_code);
        memcpy(&offset_code, record + sizeof step_code, sizeof offset_code);
        if (step_code == 0 && record_bytes >= CONSTANT_STOP) {
            uint32_t constant;
            memcpy(&constant, record + CONSTANT_START, sizeof constant);
            for (size_t j = 0; j < width; j++) row[j] = constant;
            continue;
        }
        const float step = float_of(((uint32_t)step_code << STEP_SHIFT) + LEAST_STEP), offset = offset_code * unit;
        if (bits == 8)
            values_of(payload, width, step, offset, row);
        else if (bits == 4)
            unpacked_values_of(payload, width, 4, step, offset, row);
        else if (bits == 3)
            unpacked_values_of(payload, width, 3, step, offset, row);
        else
            unpacked_values_of(payload, width, 2, step, offset, row);
    }
}
