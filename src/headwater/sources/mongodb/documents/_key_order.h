/* Bytes that sort as MongoDB sorts values; key_order.py is the same in Python and tells the layout. */
#ifndef HEADWATER_KEY_ORDER_H
#define HEADWATER_KEY_ORDER_H

#include "_values.h"

static int put_key(State *state, Bytes *to, uint8_t kind, const uint8_t *start, const uint8_t *stop, int depth);

static uint8_t key_class(uint8_t kind) {
    static const uint8_t CLASSES[20] = {0,    0x0A, 0x0F, 0x14, 0x19, 0x1E, 0x02, 0x23, 0x28, 0x2D,
                                        0x05, 0x32, 0x37, 0x3C, 0x0F, 0x41, 0x0A, 0x2F, 0x0A, 0x0A};
    return kind == MIN_KEY ? 0x01 : kind == MAX_KEY ? 0x7F : CLASSES[kind];
}

/* 0.d1d2… * 10^exponent, where the first digit is not 0. */
static bool put_number(Bytes *to, bool negative, const uint8_t *digits, int count, int exponent) {
    uint8_t turn = negative ? 0xFF : 0;
    unsigned biased = (unsigned)(exponent + 0x4000);
    while (digits[count - 1] == '0') count--;
    if (!bytes_room(to, (size_t)count / 2 + 5)) return false;
    uint8_t *at = to->at + to->used;
    *at++ = negative ? 0x03 : 0x05;
    *at++ = (uint8_t)(biased >> 8) ^ turn;
    *at++ = (uint8_t)biased ^ turn;
    for (int place = 0; place < count; place += 2) {
        int low = place + 1 < count ? digits[place + 1] - '0' : 0;
        *at++ = (uint8_t)((digits[place] - '0') * 10 + low + 1) ^ turn;
    }
    *at++ = turn;
    to->used = (size_t)(at - to->at);
    return true;
}

static bool put_decimal_key(Bytes *to, const Decimal *decimal) {
    if (decimal->special == NOT_A_NUMBER) return put_byte(to, 0x01);
    if (decimal->special == INFINITE) return put_byte(to, decimal->negative ? 0x02 : 0x06);
    if (decimal->coefficient == 0) return put_byte(to, 0x04);
    return put_number(to, decimal->negative, decimal->digits, decimal->count, decimal->exponent + decimal->count);
}

static bool put_double_key(Bytes *to, double number) {
    if (isnan(number)) return put_byte(to, 0x01);
    if (isinf(number)) return put_byte(to, number < 0 ? 0x02 : 0x06);
    if (fabs(number) < 9e18 && number == (double)(int64_t)number) {
        Decimal decimal;
        whole_decimal((int64_t)number, &decimal);
        return put_decimal_key(to, &decimal);
    }
    /* a double has no more than 767 digits: this is all of it */
    char text[800];
    snprintf(text, sizeof text, "%.766e", fabs(number));
    int exponent = atoi(strchr(text, 'e') + 1);
    text[1] = text[0]; /* over the point */
    return put_number(to, number < 0, (const uint8_t *)text + 1, 767, exponent + 1);
}

static bool put_string_key(Bytes *to, const uint8_t *from, size_t size) {
    const uint8_t *end = from + size;
    for (;;) {
        const uint8_t *zero = from < end ? memchr(from, 0, (size_t)(end - from)) : NULL;
        if (!put(to, from, (size_t)((zero == NULL ? end : zero) - from))) return false;
        if (zero == NULL) return put(to, "\0\0", 2);
        if (!put(to, "\0\xff", 2)) return false;
        from = zero + 1;
    }
}

static bool put_big(Bytes *to, uint64_t number, int bytes) {
    if (!bytes_room(to, (size_t)bytes)) return false;
    for (int place = bytes - 1; place >= 0; place--) to->at[to->used++] = (uint8_t)(number >> (8 * place));
    return true;
}

static int put_key_rest(State *state, Bytes *to, uint8_t kind, const uint8_t *start, const uint8_t *stop, int depth);

static int put_object_key(State *state, Bytes *to, const uint8_t *at, const uint8_t *end, int depth, bool is_array) {
    if (depth > MOST_NESTED) return wrong(state, TOO_DEEP);
    Element element;
    for (at += 4, end--; at < end; at = element.stop) {
        if (!next_element(state, at, end, &element)) return WRONG;
        MUST(put_byte(to, key_class(element.kind)));
        if (!is_array) MUST(put(to, element.name, element.name_size + 1));
        if (put_key_rest(state, to, element.kind, element.start, element.stop, depth) != DONE) return WRONG;
    }
    MUST(put_byte(to, 0));
    return DONE;
}

static int put_key_rest(State *state, Bytes *to, uint8_t kind, const uint8_t *start, const uint8_t *stop, int depth) {
    Decimal decimal;
    switch (kind) {
    case INT:
    case LONG:
        whole_decimal(kind == INT ? int32_at(start) : int64_at(start), &decimal);
        MUST(put_decimal_key(to, &decimal));
        return DONE;
    case DOUBLE: {
        double number;
        memcpy(&number, start, 8);
        MUST(put_double_key(to, number));
        return DONE;
    }
    case DECIMAL:
        read_decimal(start, &decimal);
        MUST(put_decimal_key(to, &decimal));
        return DONE;
    case STRING:
    case SYMBOL:
    case CODE:
        MUST(put_string_key(to, start + 4, (size_t)(stop - start) - 5));
        return DONE;
    case OBJECT:
    case ARRAY:
        return put_object_key(state, to, start, stop, depth + 1, kind == ARRAY);
    case BINARY:
        MUST(put_big(to, (uint64_t)(stop - start) - 5, 4) && put(to, start + 4, (size_t)(stop - start) - 4));
        return DONE;
    case DATE:
        MUST(put_big(to, (uint64_t)int64_at(start) ^ UINT64_C(1) << 63, 8));
        return DONE;
    case TIMESTAMP:
        MUST(put_big(to, (uint64_t)int64_at(start), 8));
        return DONE;
    case DB_POINTER:
        MUST(put_big(to, (uint64_t)(stop - start) - 17, 4) && put(to, start + 4, (size_t)(stop - start) - 17) &&
             put(to, stop - 12, 12));
        return DONE;
    case CODE_WITH_SCOPE: {
        const uint8_t *middle = string_end(state, start + 4, stop);
        if (middle == NULL) return WRONG;
        MUST(put_string_key(to, start + 8, (size_t)(middle - start) - 9));
        return put_object_key(state, to, middle, stop, depth + 1, false);
    }
    default: /* ObjectId, bool, and regex as it stands; nothing of the others */
        MUST(put(to, start, (size_t)(stop - start)));
        return DONE;
    }
}

static int put_key(State *state, Bytes *to, uint8_t kind, const uint8_t *start, const uint8_t *stop, int depth) {
    MUST(put_byte(to, key_class(kind)));
    return put_key_rest(state, to, kind, start, stop, depth);
}

#endif
