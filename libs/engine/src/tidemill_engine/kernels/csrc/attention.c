// Attention that reads the block-major pool in place.
#include "vector.h"

typedef struct {
    uint8_t *keys;  // first value of the layer in block 0
    uint8_t *values;
    int64_t block_stride;  // in values
    int64_t token_stride;
    int32_t bf16;
    int32_t block_size;
    int32_t kv_heads;
    int32_t group;  // query heads that share a KV head
    int32_t dim;    // multiple of LANES
} Layer;

#define MAX_DIM 256
#define MAX_GROUP 16

INLINE const void *place(const Layer *l, const uint8_t *base, int64_t block, int token, int head) {
    return base + (block * l->block_stride + token * l->token_stride + head * l->dim) * (l->bf16 ? 2 : 4);
}

INLINE vf load_kv(const void *p, int i, const int bf16) {
    return bf16 ? load_bf16((const uint16_t *)p + i) : load((const float *)p + i);
}

static void store_head(void *out, const float *in, int dim, int bf16) {
    if (!bf16) {
        memcpy(out, in, dim * sizeof *in);
        return;
    }
    for (int i = 0; i < dim; i++) {
        uint32_t bits;
        memcpy(&bits, in + i, 4);
        int nan = (bits & 0x7fffffff) > 0x7f800000;
        ((uint16_t *)out)[i] = nan ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
}

// k and v: [tokens, stride] with kv_heads * dim values each.
EXPORT void tm_store_kv(const Layer *l, const float *k, const float *v, int stride, int tokens, const int64_t *blocks,
                        const int64_t *offsets) {
    for (int t = 0; t < tokens; t++)
        for (int head = 0; head < l->kv_heads; head++) {
            size_t from = (size_t)t * stride + head * l->dim;
            store_head((void *)place(l, l->keys, blocks[t], offsets[t], head), k + from, l->dim, l->bf16);
            store_head((void *)place(l, l->values, blocks[t], offsets[t], head), v + from, l->dim, l->bf16);
        }
}

#define RUN_TOKENS LANES  // so few that a run and the next one stay in the first cache

// Some tokens in one block, with all KV heads beside each other. While a run is met the next one's bytes are asked for.
typedef struct {
    const uint8_t *at;
    int64_t step;   // bytes from token to token
    int64_t ahead;  // bytes to the next run
    int count;
} Run;

INLINE int run_length(const Layer *l, int first, int length) {
    int count = l->block_size - first % l->block_size;
    count = count < RUN_TOKENS ? count : RUN_TOKENS;
    return count < length - first ? count : length - first;
}

INLINE Run run_of(const Layer *l, const uint8_t *base, const int64_t *table, int first, int length) {
    int count = run_length(l, first, length), next = first + count;
    const uint8_t *at = place(l, base, table[first / l->block_size], first % l->block_size, 0), *ahead = at;
    if (next < length) ahead = place(l, base, table[next / l->block_size], next % l->block_size, 0);
    return (Run){at, l->token_stride * (l->bf16 ? 2 : 4), ahead - at, count};
}

// scores[g][t] = q[g] . key[t] for a run's tokens; `scores` has `length` values a row.
INLINE void score_run(const int bf16, const int group, const uint8_t *key, Run run, const float *q, int dim,
                      float *scores, int length) {
    for (int t = 0; t < run.count; t++, key += run.step) {
        vf sums[MAX_GROUP];
#pragma GCC unroll 16
        for (int g = 0; g < group; g++) sums[g] = (vf){0};
        for (int i = 0; i < dim; i += LANES) {
            __builtin_prefetch(key + run.ahead + i * (bf16 ? 2 : 4));
            vf k = load_kv(key, i, bf16);
#pragma GCC unroll 16
            for (int g = 0; g < group; g++) sums[g] += k * load(q + g * dim + i);
        }
#pragma GCC unroll 16
        for (int g = 0; g < group; g++) scores[(size_t)g * length + t] = sum_lanes(sums[g]);
    }
}

// out[g] += sum over a run's tokens of score[g][t] * value[t], for `parts` vectors from input i on.
INLINE void weigh_run(const int bf16, const int group, const int parts, const uint8_t *value, Run run, int i,
                      const float *scores, int length, float *out, int dim) {
    vf sums[MAX_GROUP][4];
#pragma GCC unroll 16
    for (int g = 0; g < group; g++)
#pragma GCC unroll 4
        for (int p = 0; p < parts; p++) sums[g][p] = load(out + g * dim + i + p * LANES);
    for (int t = 0; t < run.count; t++, value += run.step) {
        vf v[4];
#pragma GCC unroll 4
        for (int p = 0; p < parts; p++) {
            __builtin_prefetch(value + run.ahead + (i + p * LANES) * (bf16 ? 2 : 4));
            v[p] = load_kv(value, i + p * LANES, bf16);
        }
#pragma GCC unroll 16
        for (int g = 0; g < group; g++) {
            float score = scores[(size_t)g * length + t];
#pragma GCC unroll 4
            for (int p = 0; p < parts; p++) sums[g][p] += v[p] * score;
        }
    }
#pragma GCC unroll 16
    for (int g = 0; g < group; g++)
#pragma GCC unroll 4
        for (int p = 0; p < parts; p++) store(out + g * dim + i + p * LANES, sums[g][p]);
}

// Turns scores into exp(scale * (score - top)) and returns their sum.
static float exponentials(float *row, int length, float scale) {
    vf tops = splat(-INFINITY), sum = {0};
    int t = 0;
    for (; t + LANES <= length; t += LANES) tops = vmax(tops, load(row + t));
    float top = max_lanes(tops);
    for (; t < length; t++) top = row[t] > top ? row[t] : top;
    for (t = 0; t + LANES <= length; t += LANES) {
        vf e = vexp((load(row + t) - top) * scale);
        store(row + t, e);
        sum += e;
    }
    float total = sum_lanes(sum);
    for (; t < length; t++) total += row[t] = vexp(splat((row[t] - top) * scale))[0];
    return total;
}

// One token of one sequence against its context, for the query heads of KV heads [head, end). Run by run with all
// heads, so that the pool is read once, in order. scores: [heads * group][length].
INLINE void decode_row(const Layer *l, const int bf16, const int group, const float *q, const int64_t *table,
                       int length, int head, int end, float scale, float *scores, float *out) {
    int dim = l->dim, per_head = group * dim, head_bytes = dim * (bf16 ? 2 : 4);
    size_t score_rows = (size_t)group * length;
    for (int first = 0; first < length; first += run_length(l, first, length)) {
        Run run = run_of(l, l->keys, table, first, length);
        for (int h = head; h < end; h++) {
            float *at = scores + (h - head) * score_rows + first;
            score_run(bf16, group, run.at + h * head_bytes, run, q + h * per_head, dim, at, length);
        }
    }
    for (int row = 0; row < (end - head) * group; row++) {
        float *at = scores + (size_t)row * length;
        float inverse = 1.0f / exponentials(at, length, scale);
        for (int t = 0; t < length; t++) at[t] *= inverse;
    }
    memset(out + head * per_head, 0, (end - head) * per_head * sizeof *out);
    for (int first = 0; first < length; first += run_length(l, first, length)) {
        Run run = run_of(l, l->values, table, first, length);
        for (int h = head; h < end; h++) {
            const uint8_t *value = run.at + h * head_bytes;
            const float *at = scores + (h - head) * score_rows + first;
            float *to = out + h * per_head;
            int i = 0;
            for (; i + 4 * LANES <= dim; i += 4 * LANES)
                weigh_run(bf16, group, 4, value, run, i, at, length, to, dim);
            for (; i < dim; i += LANES) weigh_run(bf16, group, 1, value, run, i, at, length, to, dim);
        }
    }
}

#define DECODE_GROUP(BF16, GROUP)                                                                                    \
    case GROUP:                                                                                                      \
        decode_row(l, BF16, GROUP, q, table, length, head, end, scale, scores, out);                                 \
        break;
#define DECODE_GROUPS(BF16)                                                                                          \
    switch (l->group) {                                                                                              \
        DECODE_GROUP(BF16, 1)                                                                                        \
        DECODE_GROUP(BF16, 2)                                                                                        \
        DECODE_GROUP(BF16, 3)                                                                                        \
        DECODE_GROUP(BF16, 4)                                                                                        \
        DECODE_GROUP(BF16, 6)                                                                                        \
        DECODE_GROUP(BF16, 7)                                                                                        \
        DECODE_GROUP(BF16, 8)                                                                                        \
        default:                                                                                                     \
            decode_row(l, BF16, l->group, q, table, length, head, end, scale, scores, out);                          \
    }

static void decode_any(const Layer *l, const float *q, const int64_t *table, int length, int head, int end,
                       float scale, float *scores, float *out) {
    if (l->bf16) {
        DECODE_GROUPS(1)
    } else {
        DECODE_GROUPS(0)
    }
}

// q [rows, stride]; table [rows, width]; out [rows, query heads * dim].
EXPORT void tm_decode_attention(const Layer *l, const float *q, int stride, const int64_t *table, int width,
                                const int64_t *lengths, int rows, float scale, float *out, int threads) {
    int64_t longest = 0;
    for (int row = 0; row < rows; row++) longest = lengths[row] > longest ? lengths[row] : longest;
    int heads = rows < threads ? 1 : l->kv_heads, parts = l->kv_heads / heads;
    int row_size = l->kv_heads * l->group * l->dim;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        float *scores = malloc(heads * l->group * longest * sizeof *scores);
#pragma omp for schedule(dynamic, 1)
        for (int unit = 0; unit < rows * parts; unit++) {
            int row = unit / parts, head = unit % parts * heads;
            decode_any(l, q + (size_t)row * stride, table + (size_t)row * width, lengths[row], head, head + heads,
                       scale, scores, out + (size_t)row * row_size);
        }
        free(scores);
    }
}

// --- prompt chunks: each lane is one (query, head) pair; keys and values are broadcast ---

#define TILE_PARTS 2
#define TILE (TILE_PARTS * LANES)
#define KEYS 8

typedef struct {
    vf query[MAX_DIM][TILE_PARTS];
    vf out[MAX_DIM][TILE_PARTS];
    vf top[TILE_PARTS], total[TILE_PARTS];
    vi position[TILE_PARTS];
} Tile;

INLINE float kv_value(const void *p, int i, const int bf16) {
    if (!bf16) return ((const float *)p)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)p)[i] << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

// Keys [first, first + count) of one block; `count` <= KEYS. Sets weights[key] = exp(score - top), 0 where hidden.
INLINE void meet_keys(const Layer *l, const int bf16, Tile *tile, int64_t block, int offset, int first, int count,
                      int head) {
    vf scores[KEYS][TILE_PARTS];
    const void *at[KEYS];
    // Past the count the last key stands in; its scores are not used.
    for (int j = 0; j < KEYS; j++) at[j] = place(l, l->keys, block, offset + (j < count ? j : count - 1), head);
#pragma GCC unroll 8
    for (int j = 0; j < KEYS; j++) scores[j][0] = scores[j][1] = (vf){0};
    for (int i = 0; i < l->dim; i++) {
        vf a = tile->query[i][0], b = tile->query[i][1];
#pragma GCC unroll 8
        for (int j = 0; j < KEYS; j++) {
            float k = kv_value(at[j], i, bf16);
            scores[j][0] += k * a;
            scores[j][1] += k * b;
        }
    }
    for (int part = 0; part < TILE_PARTS; part++) {
        vf top = tile->top[part];
        for (int j = 0; j < count; j++) {
            vi hidden = tile->position[part] < first + j;
            scores[j][part] = choose(hidden, splat(-INFINITY), scores[j][part]);
            top = vmax(top, scores[j][part]);
        }
        // A lane that has seen no key yet keeps top = -inf; 0 stands in for it, so that no inf - inf arises.
        vf safe = choose(top == splat(-INFINITY), splat(0.0f), top);
        vf shrink = vexp(tile->top[part] - safe);
        vf total = tile->total[part] * shrink;
        for (int j = 0; j < count; j++) total += scores[j][part] = vexp(scores[j][part] - safe);
        for (int j = count; j < KEYS; j++) scores[j][part] = (vf){0};
        tile->top[part] = top;
        tile->total[part] = total;
        for (int i = 0; i < l->dim; i++) tile->out[i][part] *= shrink;
    }
    for (int j = 0; j < KEYS; j++) at[j] = place(l, l->values, block, offset + (j < count ? j : count - 1), head);
    for (int i = 0; i < l->dim; i++) {
        vf a = tile->out[i][0], b = tile->out[i][1];
#pragma GCC unroll 8
        for (int j = 0; j < KEYS; j++) {
            float v = kv_value(at[j], i, bf16);
            a += v * scores[j][0];
            b += v * scores[j][1];
        }
        tile->out[i][0] = a;
        tile->out[i][1] = b;
    }
}

INLINE void meet_context(const Layer *l, const int bf16, Tile *tile, const int64_t *table, int end, int head) {
    for (int first = 0; first < end;) {
        int offset = first % l->block_size;
        int count = l->block_size - offset < end - first ? l->block_size - offset : end - first;
        count = count < KEYS ? count : KEYS;
        meet_keys(l, bf16, tile, table[first / l->block_size], offset, first, count, head);
        first += count;
    }
}

// Queries at positions start.. of one sequence, whose K and V are stored already. q [tokens, stride];
// out [tokens, query heads * dim].
EXPORT void tm_chunk_attention(const Layer *l, const float *q, int stride, const int64_t *table, int start, int tokens,
                               float scale, float *out, int threads) {
    int lanes = tokens * l->group, tiles = (lanes + TILE - 1) / TILE;
    int row_size = l->kv_heads * l->group * l->dim;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Tile *tile = aligned_alloc(64, (sizeof(Tile) + 63) / 64 * 64);
        // The last tiles see most keys: they go first, so that no thread ends with the longest.
#pragma omp for schedule(dynamic, 1)
        for (int unit = tiles * l->kv_heads - 1; unit >= 0; unit--) {
            int head = unit % l->kv_heads, first = unit / l->kv_heads * TILE;
            int last_lane = first + TILE < lanes ? first + TILE - 1 : lanes - 1;
            for (int lane = 0; lane < TILE; lane++) {
                int pair = first + lane < lanes ? first + lane : lanes - 1;
                int token = pair / l->group, g = pair % l->group;
                const float *from = q + (size_t)token * stride + (head * l->group + g) * l->dim;
                ((int32_t *)tile->position)[lane] = start + token;
                for (int i = 0; i < l->dim; i++) ((float *)tile->query[i])[lane] = from[i] * scale;
            }
            for (int part = 0; part < TILE_PARTS; part++) {
                tile->top[part] = splat(-INFINITY);
                tile->total[part] = (vf){0};
                for (int i = 0; i < l->dim; i++) tile->out[i][part] = (vf){0};
            }
            int end = start + last_lane / l->group + 1;
            if (l->bf16)
                meet_context(l, 1, tile, table, end, head);
            else
                meet_context(l, 0, tile, table, end, head);
            for (int lane = 0; first + lane <= last_lane; lane++) {
                int token = (first + lane) / l->group, g = (first + lane) % l->group;
                float *to = out + (size_t)token * row_size + (head * l->group + g) * l->dim;
                float total = ((float *)tile->total)[lane];
                for (int i = 0; i < l->dim; i++) to[i] = ((float *)tile->out[i])[lane] / total;
            }
        }
        free(tile);
    }
}
