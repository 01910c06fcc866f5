// Many rows on Intel's tile unit, with float32's accuracy: an activation is the exact sum of three bfloat16 numbers
// (8 bits of its mantissa each), and Q4_1's codes and bfloat16 weights are bfloat16 numbers already, so that every
// product is exact and sums are float32.
//
// For Q4_1 a tile sums code * activation over one group of 32 inputs; scale and minimum come in afterwards:
//   y[row] += scale * sum(code * x) + minimum * sum(x).
// The tile unit takes inputs in pairs. Here a pair is (j, j + 16) of a group, as Q4_1 keeps its nibbles.
#include "linear.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

#define BLOCK 32  // rows and columns of one register block: 2 x 2 tiles
#define SPLITS 3
#define RESIDENT_BYTES (1 << 20)  // activations that stay in a core's cache while weights pass by

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileConfig;

int tm_amx_permitted(void) {
    const int request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

INLINE vi round_bf16(vf v) {
    vi bits = (vi)v;
    return (bits + 0x7fff + (bits >> 16 & 1)) & (int32_t)0xffff0000;
}

INLINE vi pair_of(vi low, vi high) { return (vi)((__v16su)low >> 16) | high; }

// x [rows, inputs] -> parts [SPLITS][padded rows][groups][16 pairs] and sums [padded rows][groups].
static void split(const float *x, int rows, int padded, int inputs, int32_t *parts, float *sums, int threads) {
    int groups = inputs / GROUP;
    size_t plane = (size_t)padded * groups * 16;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int row = 0; row < padded; row++) {
        for (int group = 0; group < groups; group++) {
            vf low = {0}, high = {0};
            if (row < rows) {
                const float *at = x + (size_t)row * inputs + group * GROUP;
                low = load(at);
                high = load(at + 16);
            }
            size_t place = ((size_t)row * groups + group) * 16;
            sums[(size_t)row * groups + group] = sum_lanes(low + high);
            for (int part = 0; part < SPLITS; part++) {
                vi a = round_bf16(low), b = round_bf16(high), pair = pair_of(a, b);
                memcpy(parts + part * plane + place, &pair, sizeof pair);
                low -= (vf)a;
                high -= (vf)b;
            }
        }
    }
}

// A panel's weights as tiles: [groups][16 pairs][16 outputs] of two bfloat16 each.
static void unpack_panel(const Matrix *w, int panel, int32_t *out) {
    for (int group = 0; group * GROUP < w->inputs; group++) {
        const uint8_t *block = w->packed + (size_t)panel * w->panel_bytes + (size_t)group * w->group_bytes;
        for (int j = 0; j < 16; j++) {
            vi pair;
            if (w->format == Q4_1) {
                vi codes = load_u8(block + 64 + j * PANEL);
                pair = pair_of((vi)to_float(codes & 15), (vi)to_float(codes >> 4));
            } else {
                const uint16_t *values = (const uint16_t *)block + j * PANEL;
                pair = load_u16(values) | load_u16(values + 16 * PANEL) << 16;
            }
            memcpy(out + (group * 16 + j) * 16, &pair, sizeof pair);
        }
    }
}

#define MULTIPLY                                                                                                     \
    for (int part = 0; part < SPLITS; part++) {                                                                      \
        const int32_t *a = parts + part * plane + (size_t)group * 16;                                                \
        _tile_loadd(4, a, stride);                                                                                   \
        _tile_loadd(5, a + 16 * (size_t)groups * 16, stride);                                                        \
        _tile_dpbf16ps(0, 4, 6);                                                                                     \
        _tile_dpbf16ps(1, 4, 7);                                                                                     \
        _tile_dpbf16ps(2, 5, 6);                                                                                     \
        _tile_dpbf16ps(3, 5, 7);                                                                                     \
    }
#define CLEAR                                                                                                        \
    _tile_zero(0);                                                                                                   \
    _tile_zero(1);                                                                                                   \
    _tile_zero(2);                                                                                                   \
    _tile_zero(3);
#define KEEP(TO)                                                                                                     \
    _tile_stored(0, TO, BLOCK * 4);                                                                                  \
    _tile_stored(1, (TO) + 16, BLOCK * 4);                                                                           \
    _tile_stored(2, (TO) + 16 * BLOCK, BLOCK * 4);                                                                   \
    _tile_stored(3, (TO) + 16 * BLOCK + 16, BLOCK * 4);

// sums of 32 rows by two panels into out [32][2][16]; `parts` and `x_sums` start at the first row.
static void block_q4(const Matrix *w, const uint8_t *const panels[2], const int32_t *const tiles[2],
                     const int32_t *parts, size_t plane, const float *x_sums, float out[BLOCK][2][16]) {
    int groups = w->inputs / GROUP;
    long stride = groups * 64L;
    float products[BLOCK][2][16] __attribute__((aligned(64)));
    for (int group = 0; group < groups; group++) {
        CLEAR
        _tile_loadd(6, tiles[0] + group * 256, 64);
        _tile_loadd(7, tiles[1] + group * 256, 64);
        MULTIPLY
        KEEP(products[0][0])
        for (int p = 0; p < 2; p++) {
            const uint16_t *block = (const uint16_t *)(panels[p] + (size_t)group * w->group_bytes);
            vf scale = load_f16(block), minimum = load_f16(block + PANEL);
#pragma GCC unroll 8
            for (int row = 0; row < BLOCK; row++) {
                vf sum = load(out[row][p]) + minimum * x_sums[(size_t)row * groups + group];
                store(out[row][p], sum + scale * load(products[row][p]));
            }
        }
    }
}

static void block_bf16(const Matrix *w, const int32_t *const tiles[2], const int32_t *parts, size_t plane,
                       float out[BLOCK][2][16]) {
    int groups = w->inputs / GROUP;
    long stride = groups * 64L;
    CLEAR
    for (int group = 0; group < groups; group++) {
        _tile_loadd(6, tiles[0] + group * 256, 64);
        _tile_loadd(7, tiles[1] + group * 256, 64);
        MULTIPLY
    }
    KEEP(out[0][0])
}

static void write_block(const Matrix *w, int panel, float out[BLOCK][2][16], int rows, float *y) {
    for (int p = 0; p < 2; p++) {
        int column = (panel + p) * PANEL, width = w->outputs - column < PANEL ? w->outputs - column : PANEL;
        if (width <= 0) continue;
        vf bias = w->bias ? load(w->bias + column) : (vf){0};
        for (int row = 0; row < rows; row++) {
            vf sum = load(out[row][p]) + bias;
            memcpy(y + (size_t)row * w->outputs + column, &sum, width * sizeof *y);
        }
    }
}

static void configure(void) {
    TileConfig config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        config.rows[tile] = 16;
        config.row_bytes[tile] = 64;
    }
    _tile_loadconfig(&config);
}

// Q4_1 or bfloat16 weights, inputs a multiple of 32.
void tm_linear_amx(const Matrix *w, const float *x, int rows, float *y, int threads) {
    int groups = w->inputs / GROUP, panels = (w->outputs + PANEL - 1) / PANEL;
    int padded = (rows + BLOCK - 1) / BLOCK * BLOCK, pairs = (panels + 1) / 2;
    int chunk = RESIDENT_BYTES / (SPLITS * 2 * w->inputs) / BLOCK * BLOCK;
    chunk = chunk < BLOCK ? BLOCK : chunk;
    int chunks = (rows + chunk - 1) / chunk;
    size_t plane = (size_t)padded * groups * 16;
    int32_t *parts = aligned_alloc(64, plane * SPLITS * sizeof *parts);
    float *x_sums = aligned_alloc(64, ((size_t)padded * groups * sizeof *x_sums + 63) / 64 * 64);
    split(x, rows, padded, w->inputs, parts, x_sums, threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        int32_t *space = aligned_alloc(64, (size_t)groups * 2048);
        float out[BLOCK][2][16] __attribute__((aligned(64)));
        configure();
#pragma omp for schedule(dynamic, 1)
        for (int unit = 0; unit < chunks * pairs; unit++) {
            int panel = unit % pairs * 2, first = unit / pairs * chunk;
            int second = panel + 1 < panels ? panel + 1 : panel;
            int end = first + chunk < rows ? first + chunk : rows;
            const int32_t *tiles[2] = {space, space + (size_t)groups * 256};
            const uint8_t *blocks[2] = {w->packed + (size_t)panel * w->panel_bytes,
                                        w->packed + (size_t)second * w->panel_bytes};
            unpack_panel(w, panel, space);
            unpack_panel(w, second, space + (size_t)groups * 256);
            for (int row = first; row < end; row += BLOCK) {
                const int32_t *at = parts + (size_t)row * groups * 16;
                memset(out, 0, sizeof out);
                if (w->format == Q4_1)
                    block_q4(w, blocks, tiles, at, plane, x_sums + (size_t)row * groups, out);
                else
                    block_bf16(w, tiles, at, plane, out);
                write_block(w, panel, out, end - row < BLOCK ? end - row : BLOCK, y + (size_t)row * w->outputs);
            }
        }
        _tile_release();
        free(space);
    }
    free(parts);
    free(x_sums);
}
#else
int tm_amx_permitted(void) { return 0; }

void tm_linear_amx(const Matrix *w, const float *x, int rows, float *y, int threads) {
    (void)w, (void)x, (void)rows, (void)y, (void)threads;
    abort();  // never called without permission
}
#endif
