// y = x W^T + b with float32 activations and sums. Weights stay packed; a tile unpacks them on the way to the registers.
//
// Packed weights: panels of 16 output rows. A group is 32 inputs.
//   f32   [panel][in][16] float
//   bf16  [panel][in][16] uint16
//   q4_1  [panel][group] { half scale[16]; half minimum[16]; uint8 pair[16][16]: inputs j (low nibble) and j + 16 }
//   q8_0  [panel][group] { half scale[16]; int8 value[32][16] }
// A row's sum runs over the inputs in order, whatever the number of rows: results do not depend on the batch.
#include "linear.h"

#if LANES == 16
#define MAX_ROWS 8
#define MAX_PANELS 4
#else
#define MAX_ROWS 6
#define MAX_PANELS 4
#endif

INLINE void unpack_q4(const uint8_t *block, vf *out) {
    const uint16_t *scales = (const uint16_t *)block;
    const uint8_t *pairs = block + 64;
    for (int part = 0; part < PARTS; part++) {
        vf scale = load_f16(scales + part * LANES), minimum = load_f16(scales + PANEL + part * LANES);
#pragma GCC unroll 16
        for (int j = 0; j < 16; j++) {
            vi pair = load_u8(pairs + j * PANEL + part * LANES);
            out[j * PARTS + part] = to_float(pair & 15) * scale + minimum;
            out[(j + 16) * PARTS + part] = to_float(pair >> 4) * scale + minimum;
        }
    }
}

INLINE void unpack_q8(const uint8_t *block, vf *out) {
    const uint16_t *scales = (const uint16_t *)block;
    const int8_t *values = (const int8_t *)(block + 32);
    for (int part = 0; part < PARTS; part++) {
        vf scale = load_f16(scales + part * LANES);
#pragma GCC unroll 32
        for (int j = 0; j < GROUP; j++) {
            out[j * PARTS + part] = to_float(load_s8(values + j * PANEL + part * LANES)) * scale;
        }
    }
}

INLINE void unpack_bf16(const uint8_t *block, int count, vf *out) {
    for (int i = 0; i < count * PARTS; i++) out[i] = load_bf16((const uint16_t *)block + i * LANES);
}

// Inputs [32 * group, 32 * group + count) of a panel, as floats; may point into the weights themselves.
INLINE const vf *unpack(const Matrix *w, const int format, int panel, int group, int count, vf *space) {
    const uint8_t *block = w->packed + (size_t)panel * w->panel_bytes + (size_t)group * w->group_bytes;
    if (format == F32) return (const vf *)block;
    if (format == BF16) unpack_bf16(block, count, space);
    if (format == Q4_1) unpack_q4(block, space);
    if (format == Q8_0) unpack_q8(block, space);
    return space;
}

// Asks for a group that the next tile reads: packed panels are so short that the processor's own reading ahead, which
// ends with a page, never gets going.
INLINE void fetch(const Matrix *w, int panel, int group) {
    const uint8_t *at = w->packed + (size_t)panel * w->panel_bytes + (size_t)group * w->group_bytes;
    for (int64_t i = 0; i < w->group_bytes; i += 64) __builtin_prefetch(at + i);
}

// `rows` rows of x by `panels` panels, both constants where this is inlined.
INLINE void tile(const Matrix *w, const int format, int first, const int panels, const float *x, int ldx,
                 const int rows, float *y, int ldy) {
    vf sums[MAX_ROWS][MAX_PANELS * PARTS];
    vf space[MAX_PANELS][GROUP * PARTS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < panels * PARTS; c++) sums[r][c] = (vf){0};
    int groups = (w->inputs + GROUP - 1) / GROUP;
    for (int group = 0; group < groups; group++) {
        int count = w->inputs - group * GROUP < GROUP ? w->inputs - group * GROUP : GROUP;
        const vf *weights[MAX_PANELS];
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) {
            weights[p] = unpack(w, format, first + p, group, count, space[p]);
            if (format != F32) fetch(w, first + p + panels, group);
        }
        const float *at = x + group * GROUP;
        for (int k = 0; k < count; k++) {
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
                for (int p = 0; p < panels; p++)
#pragma GCC unroll 2
                    for (int part = 0; part < PARTS; part++)
                        sums[r][p * PARTS + part] += at[(size_t)r * ldx + k] * weights[p][k * PARTS + part];
        }
    }
#pragma GCC unroll 4
    for (int p = 0; p < panels; p++) {
        int column = (first + p) * PANEL;
        int width = w->outputs - column < PANEL ? w->outputs - column : PANEL;
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            float *out = y + (size_t)r * ldy + column, whole[PANEL];
#pragma GCC unroll 2
            for (int part = 0; part < PARTS; part++) {
                vf sum = sums[r][p * PARTS + part];
                if (w->bias) sum += load(w->bias + column + part * LANES);
                store((width == PANEL ? out : whole) + part * LANES, sum);
            }
            if (width < PANEL) memcpy(out, whole, width * sizeof *out);
        }
    }
}

// Panels [first, end) for up to MAX_ROWS rows; few rows take more panels at once to keep enough sums in flight.
#define DEFINE_ROWS(NAME, FORMAT, ROWS, PANELS)                                                                      \
    static void NAME(const Matrix *w, int first, int end, const float *x, int ldx, float *y, int ldy) {               \
        for (; first + PANELS <= end; first += PANELS) tile(w, FORMAT, first, PANELS, x, ldx, ROWS, y, ldy);          \
        for (; first < end; first++) tile(w, FORMAT, first, 1, x, ldx, ROWS, y, ldy);                                 \
    }
#if LANES == 16
#define DEFINE_FORMAT(NAME, FORMAT)                                                                                  \
    DEFINE_ROWS(NAME##1, FORMAT, 1, 4)                                                                               \
    DEFINE_ROWS(NAME##2, FORMAT, 2, 4)                                                                               \
    DEFINE_ROWS(NAME##3, FORMAT, 3, 2)                                                                               \
    DEFINE_ROWS(NAME##4, FORMAT, 4, 2)                                                                               \
    DEFINE_ROWS(NAME##5, FORMAT, 5, 2)                                                                               \
    DEFINE_ROWS(NAME##6, FORMAT, 6, 2)                                                                               \
    DEFINE_ROWS(NAME##7, FORMAT, 7, 2)                                                                               \
    DEFINE_ROWS(NAME##8, FORMAT, 8, 2)                                                                               \
    static const Tile NAME[] = {NAME##1, NAME##2, NAME##3, NAME##4, NAME##5, NAME##6, NAME##7, NAME##8};
#else
#define DEFINE_FORMAT(NAME, FORMAT)                                                                                  \
    DEFINE_ROWS(NAME##1, FORMAT, 1, 4)                                                                               \
    DEFINE_ROWS(NAME##2, FORMAT, 2, 2)                                                                               \
    DEFINE_ROWS(NAME##3, FORMAT, 3, 1)                                                                               \
    DEFINE_ROWS(NAME##4, FORMAT, 4, 1)                                                                               \
    DEFINE_ROWS(NAME##5, FORMAT, 5, 1)                                                                               \
    DEFINE_ROWS(NAME##6, FORMAT, 6, 1)                                                                               \
    static const Tile NAME[] = {NAME##1, NAME##2, NAME##3, NAME##4, NAME##5, NAME##6};
#endif

typedef void (*Tile)(const Matrix *, int, int, const float *, int, float *, int);
DEFINE_FORMAT(tiles_f32, F32)
DEFINE_FORMAT(tiles_bf16, BF16)
DEFINE_FORMAT(tiles_q4, Q4_1)
DEFINE_FORMAT(tiles_q8, Q8_0)
static const Tile *const tiles_of[] = {tiles_f32, tiles_bf16, tiles_q4, tiles_q8};

// Many rows: a pair of panels is unpacked once and then met by all rows.
static void strip(const Matrix *w, int first, int end, const float *x, int rows, float *y, float *space) {
    Matrix flat = *w;
    flat.format = F32;
    flat.group_bytes = GROUP * PANEL * sizeof(float);
    flat.panel_bytes = (int64_t)w->inputs * PANEL * sizeof(float);
    flat.packed = (const uint8_t *)space - first * flat.panel_bytes;
    for (int panel = first; panel < end && w->format != F32; panel++) {
        vf *out = (vf *)((uint8_t *)flat.packed + panel * flat.panel_bytes);
        for (int group = 0; group * GROUP < w->inputs; group++) {
            int count = w->inputs - group * GROUP < GROUP ? w->inputs - group * GROUP : GROUP;
            vf *at = out + group * GROUP * PARTS;
            if (w->format == BF16) unpack(w, BF16, panel, group, count, at);
            if (w->format == Q4_1) unpack(w, Q4_1, panel, group, count, at);
            if (w->format == Q8_0) unpack(w, Q8_0, panel, group, count, at);
        }
    }
    const Matrix *source = w->format == F32 ? w : &flat;
    for (int row = 0; row < rows; row += MAX_ROWS) {
        int count = rows - row < MAX_ROWS ? rows - row : MAX_ROWS;
        const float *at = x + (size_t)row * w->inputs;
        tiles_f32[count - 1](source, first, end, at, w->inputs, y + (size_t)row * w->outputs, w->outputs);
    }
}

#define AMX_ROWS 16  // from here on tiles are faster, though padded to 32 rows

static int use_amx;

// Asks for the tile unit; returns whether it will be used.
EXPORT int tm_init(void) { return use_amx = tm_amx_permitted(); }

// x [rows, inputs] and y [rows, outputs] are contiguous.
EXPORT void tm_linear(const Matrix *w, const float *x, int rows, float *y, int threads) {
    if (use_amx && rows >= AMX_ROWS && (w->format == Q4_1 || w->format == BF16) && w->inputs % GROUP == 0) {
        tm_linear_amx(w, x, rows, y, threads);
        return;
    }
    int panels = (w->outputs + PANEL - 1) / PANEL;
    int few = rows <= MAX_ROWS;
    // Small shares, taken as threads get free, so that one that lost its core delays the others little.
    int share = few ? 8 : 2;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        float *space = few || w->format == F32 ? NULL : aligned_alloc(64, (size_t)w->inputs * PANEL * share * 4);
#pragma omp for schedule(dynamic, 1)
        for (int first = 0; first < panels; first += share) {
            int end = first + share < panels ? first + share : panels;
            if (few)
                tiles_of[w->format][rows - 1](w, first, end, x, w->inputs, y, w->outputs);
            else
                strip(w, first, end, x, rows, y, space);
        }
        free(space);
    }
}
