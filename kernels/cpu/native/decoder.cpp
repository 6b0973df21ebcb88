// All layers of a step in one call: the other files' operations in the order of server/models/decoder.py, so the result has
// their bits. What is saved is the way through Python and its allocator, which costs a step of one request as much as reading
// the weights does.
#include <cstring>

#include "kernels.h"
#include "linear.h"

namespace {

constexpr int DENSE = -1;

struct Stack {  // one linear layer: parts whose outputs lie side by side
    const Linear *parts;
    int64_t count;
};

struct Layer {
    const void *input_norm, *mlp_norm, *post_attention_norm, *post_mlp_norm;  // the last two may be null
    const float *q_norm, *k_norm, *cos_sin;                                   // the first two may be null
    void *key, *value;
    Stack qkv, output, gate_up, down;
    int32_t window, rotary_dim;
};

struct Decoder {
    const Layer *layers;
    const void *final_norm;
    int64_t num_layers, hidden_size, inner_size;
    int32_t num_heads, num_kv_heads, head_dim, block_size, activation, dtype;
    float norm_eps, head_norm_eps, attention_scale, attention_soft_cap;
};

enum Result : int { DONE = 0, NO_MEMORY = 1, NO_SUCH_ROW = 2 };

// One step's buffers, [rows, ...] of the decoder's dtype each. The MLP's lie where the attention's lay.
struct Buffers {
    char *normed, *projected, *qkv, *q, *attended, *gate_up, *activated;
};

// Places the buffers at scratch. Returns how many bytes they take.
int64_t place(const Decoder &d, int64_t rows, char *scratch, Buffers &b) {
    auto bytes = [&](int64_t columns) { return (rows * columns * (d.dtype == F32 ? 4 : 2) + 63) / 64 * 64; };
    int64_t q_size = (int64_t)d.num_heads * d.head_dim, kv_size = (int64_t)d.num_kv_heads * d.head_dim;
    b.normed = scratch;
    b.projected = b.normed + bytes(d.hidden_size);
    b.qkv = b.gate_up = b.projected + bytes(d.hidden_size);
    b.q = b.qkv + bytes(q_size + 2 * kv_size);
    b.attended = b.q + bytes(q_size);
    b.activated = b.gate_up + bytes(2 * d.inner_size);
    char *attention_end = b.attended + bytes(q_size), *mlp_end = b.activated + bytes(d.inner_size);
    return (attention_end > mlp_end ? attention_end : mlp_end) - scratch;
}

// One call's state. residual and num_rows change where only some rows are wanted of the last layer.
struct Run {
    const Decoder &d;
    const Step &step;
    Buffers b;
    char *residual;
    int64_t num_rows;

    int64_t row_bytes(int64_t columns) const { return columns * (d.dtype == F32 ? 4 : 2); }

    void norm(const void *x, void *sum, const void *weight, void *out) const {
        pt_norm(x, sum, weight, out, num_rows, d.hidden_size, d.norm_eps, d.dtype, d.dtype, step.threads);
    }

    int linear(const Stack &stack, const void *x, char *out) const {
        for (int64_t i = 0; i < stack.count; i++) {
            const Linear &part = stack.parts[i];
            if (part.kind == DENSE)
                pt_dense_linear(&part, x, out, num_rows, step.threads);
            else if (pt_quant_linear(&part, x, out, num_rows, step.threads))
                return NO_MEMORY;
            out += row_bytes(part.out_features);
        }
        return DONE;
    }

    int attention(const Layer &l) const {
        if (linear(l.qkv, b.normed, b.qkv)) return NO_MEMORY;
        pt_rope(&step, b.qkv, b.q, l.key, l.value, l.cos_sin, l.q_norm, l.k_norm, d.head_norm_eps, l.rotary_dim, d.num_heads,
                d.num_kv_heads, d.head_dim, d.block_size, d.dtype, d.dtype);
        return pt_attention(&step, b.q, b.attended, l.key, l.value, d.num_heads, d.num_kv_heads, d.head_dim, d.block_size,
                            l.window, d.attention_scale, d.attention_soft_cap, d.dtype);
    }

    // Attention's output and the residual, cut down to the wanted rows. residual_out: where the latter go.
    void select(const int64_t *rows, int64_t count, char *residual_out) {
        int64_t q_bytes = row_bytes((int64_t)d.num_heads * d.head_dim), hidden_bytes = row_bytes(d.hidden_size);
        for (int64_t i = 0; i < count; i++) {
            memcpy(b.q + i * q_bytes, b.attended + rows[i] * q_bytes, q_bytes);
            memcpy(residual_out + i * hidden_bytes, residual + rows[i] * hidden_bytes, hidden_bytes);
        }
        b.attended = b.q;
        residual = residual_out;
        num_rows = count;
    }

    // From attention's output to what is added to the residual next, in b.projected.
    int project(const Layer &l) const {
        if (linear(l.output, b.attended, b.projected)) return NO_MEMORY;
        if (l.post_attention_norm) norm(b.projected, nullptr, l.post_attention_norm, b.projected);
        norm(b.projected, residual, l.mlp_norm, b.normed);
        if (linear(l.gate_up, b.normed, b.gate_up)) return NO_MEMORY;
        pt_gated(b.gate_up, b.activated, num_rows, d.inner_size, d.activation, d.dtype, step.threads);
        if (linear(l.down, b.activated, b.projected)) return NO_MEMORY;
        if (l.post_mlp_norm) norm(b.projected, nullptr, l.post_mlp_norm, b.projected);
        return DONE;
    }
};

}  // namespace

extern "C" {

// Bytes of scratch that a step of so many rows needs.
int64_t pt_decoder_scratch(const Decoder *decoder, int64_t rows) {
    Buffers b;
    return place(*decoder, rows, nullptr, b);
}

// x [T, C]: the embedded tokens; the residual is kept there. rows: the num_rows tokens that are wanted, or null for all T.
// Writes keys and values of all tokens, and out [num_rows, C]: the wanted ones' normed hidden states. scratch:
// pt_decoder_scratch of the larger of T and num_rows. Returns a Result.
int pt_decoder_forward(const Decoder *decoder, const Step *step, void *x, const int64_t *rows, int64_t num_rows, void *scratch,
                       void *out) {
    const Decoder &d = *decoder;
    for (int64_t i = 0; rows && i < num_rows; i++)
        if (rows[i] < 0 || rows[i] >= step->num_tokens) return NO_SUCH_ROW;
    Run run = {d, *step, {}, (char *)x, step->num_tokens};
    place(d, num_rows > step->num_tokens ? num_rows : step->num_tokens, (char *)scratch, run.b);
    bool selects = rows || !num_rows;  // a list of no rows has no address
    for (int64_t i = 0; i < d.num_layers; i++) {
        const Layer &layer = d.layers[i];
        run.norm(i ? run.b.projected : run.residual, i ? run.residual : nullptr, layer.input_norm, run.b.normed);
        if (run.attention(layer)) return NO_MEMORY;
        if (selects && i == d.num_layers - 1) run.select(rows, num_rows, (char *)out);
        if (run.project(layer)) return NO_MEMORY;
    }
    run.norm(run.b.projected, run.residual, d.final_norm, out);
    return DONE;
}
}
