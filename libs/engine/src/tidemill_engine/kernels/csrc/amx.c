// Many rows on Intel's tile unit, with float32's accuracy: an activation is the exact sum of three bfloat16 numbers
// (8 bits of its mantissa each), and Q4_1's codes and bfloat16 weights are bfloat16 numbers already, so that every
// product is exact and sums are float32.
//
// For Q4_1 a tile sums code * activation over one group of 32 inputs, and the scale comes in afterwards, while the tile
// unit works on other rows. The minima are a matrix of their own, of two bfloat16 numbers each, whose inputs are the
// sums of the groups' activations.
//
// The tile unit takes inputs in pairs. Here a pair is (j, j + 16) of a group, as Q4_1 keeps its nibbles.
#include "linear.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

#define BLOCK 32  // rows and columns of one register block: 2 x 2 tiles
#define X_PARTS 3
#define RESIDENT_BYTES (1 << 20)  // activations that stay in a core's second cache while weights pass by
#define TILE 256                  // 16 x 16 pairs

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

INLINE void split_group(vf low, vf high, int32_t *out) {
    for (int part = 0; part < X_PARTS; part++) {
        vi a = round_bf16(low), b = round_bf16(high), pair = pair_of(a, b);
        memcpy(out + part * TILE, &pair, sizeof pair);
        low -= (vf)a;
        high -= (vf)b;
    }
}

// Groups of sums that follow the inputs' groups.
INLINE int sum_groups(const Matrix *w) {
    return w->format == Q4_1 ? (w->inputs / GROUP + GROUP - 1) / GROUP : 0;
}

// x [rows, inputs] -> tiles [padded rows / 16][groups][X_PARTS][16 rows][16 pairs], the groups' sums behind the groups:
// in the order in which `products` reads them. The threads of a parallel region share the rows.
static void split(const Matrix *w, const float *x, int rows, int padded, int32_t *parts) {
    int groups = w->inputs / GROUP, more = sum_groups(w);
#pragma omp for
    for (int row = 0; row < padded; row++) {
        int32_t *out = parts + (size_t)(row / 16) * (groups + more) * X_PARTS * TILE + row % 16 * 16;
        float sums[GROUP];
        memset(sums, 0, sizeof sums);
        for (int group = 0; group < groups; group++) {
            vf low = {0}, high = {0};
            if (row < rows) {
                const float *at = x + (size_t)row * w->inputs + group * GROUP;
                low = load(at);
                high = load(at + 16);
            }
            split_group(low, high, out + (size_t)group * X_PARTS * TILE);
            sums[group % GROUP] = sum_lanes(low + high);
            if (more && (group % GROUP == GROUP - 1 || group == groups - 1)) {
                split_group(load(sums), load(sums + 16), out + (size_t)(groups + group / GROUP) * X_PARTS * TILE);
                memset(sums, 0, sizeof sums);
            }
        }
    }
}

// A panel's weights as tiles [groups][16 pairs][16 outputs], for Q4_1 two parts of the minima behind them.
static void unpack_panel(const Matrix *w, int panel, int32_t *out) {
    int groups = w->inputs / GROUP;
    const uint8_t *block = w->packed + (size_t)panel * w->panel_bytes;
    const uint8_t *minima = block + PANEL * sizeof(uint16_t);
    for (int group = 0; group < groups; group++, block += w->group_bytes) {
        for (int j = 0; j < 16; j++, out += 16) {
            vi pair;
            if (w->format == Q4_1) {
                vi codes = load_u8(block + 64 + j * PANEL);
                pair = pair_of((vi)to_float(codes & 15), (vi)to_float(codes >> 4));
            } else {
                const uint16_t *values = (const uint16_t *)block + j * PANEL;
                pair = load_u16(values) | load_u16(values + 16 * PANEL) << 16;
            }
            memcpy(out, &pair, sizeof pair);
        }
    }
    for (int first = 0; first < groups && w->format == Q4_1; first += GROUP, out += 2 * TILE) {
        for (int j = 0; j < 16; j++) {
            vf half[2] = {{0}, {0}};
            for (int h = 0; h < 2; h++) {
                int group = first + j + 16 * h;
                if (group < groups) half[h] = load_f16((const uint16_t *)(minima + (size_t)group * w->group_bytes));
            }
            vi a = round_bf16(half[0]), b = round_bf16(half[1]);  // the rest of 11 bits fits as well
            vi pair = pair_of(a, b), rest = pair_of((vi)(half[0] - (vf)a), (vi)(half[1] - (vf)b));
            memcpy(out + j * 16, &pair, sizeof pair);
            memcpy(out + TILE + j * 16, &rest, sizeof rest);
        }
    }
}

#define CLEAR                                                                                                        \
    _tile_zero(0);                                                                                                   \
    _tile_zero(1);                                                                                                   \
    _tile_zero(2);                                                                                                   \
    _tile_zero(3);
#define WEIGHTS(AT)                                                                                                  \
    _tile_loadd(6, (AT)[0], 64);                                                                                     \
    _tile_loadd(7, (AT)[1], 64);
#define MULTIPLY(A, B)                                                                                               \
    _tile_loadd(4, A, 64);                                                                                           \
    _tile_dpbf16ps(0, 4, 6);                                                                                         \
    _tile_dpbf16ps(1, 4, 7);                                                                                         \
    _tile_loadd(5, B, 64);                                                                                           \
    _tile_dpbf16ps(2, 5, 6);                                                                                         \
    _tile_dpbf16ps(3, 5, 7);
#define KEEP_HALF(LOW, HIGH, TO)                                                                                     \
    _tile_stored(LOW, TO, BLOCK * 4);                                                                                \
    _tile_stored(HIGH, (TO) + 16, BLOCK * 4);

// 32 rows of activations as `split` leaves them, in halves.
typedef struct {
    const int32_t *parts[2];
    int groups;
} Rows;

// sums = activations of groups [first, end) times tiles [end - first][weight parts].
INLINE void products(const Rows *x, const int32_t *const tiles[2], int first, int end, const int w_parts,
                     float sums[BLOCK][2][16]) {
    CLEAR
    for (int group = first; group < end; group++) {
        for (int w_part = 0; w_part < w_parts; w_part++) {
            size_t place = (size_t)((group - first) * w_parts + w_part) * TILE;
            const int32_t *at[2] = {tiles[0] + place, tiles[1] + place};
            WEIGHTS(at)
#pragma GCC unroll 3
            for (int part = 0; part < X_PARTS; part++) {
                size_t a = ((size_t)group * X_PARTS + part) * TILE;
                MULTIPLY(x->parts[0] + a, x->parts[1] + a)
            }
        }
    }
    KEEP_HALF(0, 1, sums[0][0])
    KEEP_HALF(2, 3, sums[16][0])
}

// Of 16 rows; fused by name, so that no row is rounded otherwise than its neighbour.
INLINE void add_scaled(float (*sums)[2][16], float (*group_sums)[2][16], const vf *scales) {
#pragma GCC unroll 16
    for (int row = 0; row < BLOCK / 2; row++) {
#pragma GCC unroll 2
        for (int p = 0; p < 2; p++)
            store(sums[row][p], (vf)_mm512_fmadd_ps((__m512)scales[p], (__m512)load(group_sums[row][p]),
                                                     (__m512)load(sums[row][p])));
    }
}

INLINE void load_scales(const Matrix *w, const uint8_t *const panels[2], int group, vf *scales) {
#pragma GCC unroll 2
    for (int p = 0; p < 2; p++) scales[p] = load_f16((const uint16_t *)(panels[p] + (size_t)group * w->group_bytes));
}

// LOW, HIGH = the parts A of 16 rows of one group times the weights.
_Static_assert(X_PARTS == 3, "HALF multiplies three parts");
#define HALF(LOW, HIGH, A)                                                                                           \
    _tile_zero(LOW);                                                                                                 \
    _tile_zero(HIGH);                                                                                                \
    _tile_loadd(4, A, 64);                                                                                           \
    _tile_dpbf16ps(LOW, 4, 6);                                                                                       \
    _tile_dpbf16ps(HIGH, 4, 7);                                                                                      \
    _tile_loadd(5, (A) + TILE, 64);                                                                                  \
    _tile_dpbf16ps(LOW, 5, 6);                                                                                       \
    _tile_dpbf16ps(HIGH, 5, 7);                                                                                      \
    _tile_loadd(4, (A) + 2 * TILE, 64);                                                                              \
    _tile_dpbf16ps(LOW, 4, 6);                                                                                       \
    _tile_dpbf16ps(HIGH, 4, 7);

// sums of 32 rows by two panels. While the tile unit works on one half of the rows, the other half's sums are scaled.
static void block_q4(const Matrix *w, const uint8_t *const panels[2], const int32_t *const tiles[2], const Rows *x,
                     float sums[BLOCK][2][16]) {
    int groups = w->inputs / GROUP;
    const int32_t *minima[2] = {tiles[0] + (size_t)groups * TILE, tiles[1] + (size_t)groups * TILE};
    float ready[2][BLOCK / 2][2][16] __attribute__((aligned(64)));
    vf scales[2] = {{0}};
    products(x, minima, groups, x->groups, 2, sums);
    memset(ready, 0, sizeof ready);
    for (int group = 0; group < groups; group++) {
        const int32_t *at[2] = {tiles[0] + (size_t)group * TILE, tiles[1] + (size_t)group * TILE};
        size_t parts = (size_t)group * X_PARTS * TILE;
        WEIGHTS(at)
        HALF(0, 1, x->parts[0] + parts)
        add_scaled(sums + 16, ready[1], scales);
        load_scales(w, panels, group, scales);
        KEEP_HALF(0, 1, ready[0][0][0])
        HALF(2, 3, x->parts[1] + parts)
        add_scaled(sums, ready[0], scales);
        KEEP_HALF(2, 3, ready[1][0][0])
    }
    add_scaled(sums + 16, ready[1], scales);
}

static void write_block(const Matrix *w, int panel, float sums[BLOCK][2][16], int rows, float *y) {
    for (int p = 0; p < 2; p++) {
        int column = (panel + p) * PANEL, width = w->outputs - column < PANEL ? w->outputs - column : PANEL;
        if (width <= 0) continue;
        vf bias = w->bias ? load(w->bias + column) : (vf){0};
        for (int row = 0; row < rows; row++) {
            float *out = y + (size_t)row * w->outputs + column;
            vf sum = load(sums[row][p]) + bias;
            if (width == PANEL)
                store(out, sum);
            else
                memcpy(out, &sum, width * sizeof sum[0]);
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
    int groups = w->inputs / GROUP, x_groups = groups + sum_groups(w);
    int panels = (w->outputs + PANEL - 1) / PANEL, pairs = (panels + 1) / 2;
    int blocks = (rows + BLOCK - 1) / BLOCK, padded = blocks * BLOCK;
    int resident = RESIDENT_BYTES / (X_PARTS * 64 * x_groups * BLOCK) + 1;
    int chunks = (blocks + resident - 1) / resident, chunk = (blocks + chunks - 1) / chunks;
    size_t panel_tiles = (size_t)(groups + 2 * sum_groups(w)) * TILE;
    int32_t *parts = aligned_alloc(64, (size_t)padded * x_groups * X_PARTS * 16 * sizeof *parts);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        int32_t *space = aligned_alloc(64, 2 * panel_tiles * sizeof *space);
        const int32_t *tiles[2] = {space, space + panel_tiles};
        float sums[BLOCK][2][16] __attribute__((aligned(64)));
        configure();
        split(w, x, rows, padded, parts);
#pragma omp for schedule(dynamic, 1)
        for (int unit = 0; unit < chunks * pairs; unit++) {
            int panel = unit % pairs * 2, second = panel + 1 < panels ? panel + 1 : panel;
            int first = unit / pairs * chunk, end = first + chunk < blocks ? first + chunk : blocks;
            const uint8_t *panels_at[2] = {w->packed + (size_t)panel * w->panel_bytes,
                                           w->packed + (size_t)second * w->panel_bytes};
            unpack_panel(w, panel, space);
            unpack_panel(w, second, space + panel_tiles);
            for (int block = first; block < end; block++) {
                int row = block * BLOCK, left = rows - row;
                const int32_t *half = parts + (size_t)row / 16 * x_groups * X_PARTS * TILE;
                Rows x_rows = {{half, half + (size_t)x_groups * X_PARTS * TILE}, x_groups};
                float *out = y + (size_t)row * w->outputs;
                if (w->format == Q4_1)
                    block_q4(w, panels_at, tiles, &x_rows, sums);
                else
                    products(&x_rows, tiles, 0, groups, 1, sums);
                write_block(w, panel, sums, left < BLOCK ? left : BLOCK, out);
            }
        }
        _tile_release();
        free(space);
    }
    free(parts);
}
#else
int tm_amx_permitted(void) { return 0; }

void tm_linear_amx(const Matrix *w, const float *x, int rows, float *y, int threads) {
    (void)w, (void)x, (void)rows, (void)y, (void)threads;
    abort();  // never called without permission
}
#endif
