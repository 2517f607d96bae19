/* Texts of values: UTF-8, JSON strings, numbers, dates, Decimal128; decimals.py and extended_json.py are the same. */
#ifndef HEADWATER_VALUES_H
#define HEADWATER_VALUES_H

#include <math.h>
#include <stdio.h>

#include "_bson.h"

#define DECIMAL_DIGITS 34

typedef unsigned __int128 uint128;

static bool is_utf8(const uint8_t *at, size_t size) {
    const uint8_t *end = at + size;
    while (at < end) {
        if (end - at >= 8) {
            uint64_t word;
            memcpy(&word, at, 8);
            if ((word & UINT64_C(0x8080808080808080)) == 0) {
                at += 8;
                continue;
            }
        }
        uint8_t first = *at;
        if (first < 0x80) {
            at++;
            continue;
        }
        int more = first >= 0xC2 && first <= 0xDF ? 1 : (first & 0xF0) == 0xE0 ? 2 : first >= 0xF0 && first <= 0xF4 ? 3 : 0;
        if (more == 0 || end - at <= more) return false;
        uint8_t low = 0x80, high = 0xBF;
        if (first == 0xE0) low = 0xA0;
        if (first == 0xED) high = 0x9F; /* no halves of a pair */
        if (first == 0xF0) low = 0x90;
        if (first == 0xF4) high = 0x8F;
        if (at[1] < low || at[1] > high) return false;
        for (int place = 2; place <= more; place++)
            if ((at[place] & 0xC0) != 0x80) return false;
        at += more + 1;
    }
    return true;
}

static const char HEX[] = "0123456789abcdef";

static bool put_hex(Bytes *to, const uint8_t *from, size_t size) {
    if (!bytes_room(to, 2 * size)) return false;
    for (size_t place = 0; place < size; place++) {
        to->at[to->used++] = (uint8_t)HEX[from[place] >> 4];
        to->at[to->used++] = (uint8_t)HEX[from[place] & 15];
    }
    return true;
}

static bool put_whole(Bytes *to, int64_t number) {
    uint8_t text[20], *at = text + sizeof text;
    uint64_t left = number < 0 ? 0 - (uint64_t)number : (uint64_t)number;
    do *--at = (uint8_t)('0' + left % 10);
    while ((left /= 10) != 0);
    if (number < 0) *--at = '-';
    return put(to, at, (size_t)(text + sizeof text - at));
}

/* A text in quotes, as JSON has it. */
static int put_quoted(State *state, Bytes *to, const uint8_t *from, size_t size) {
    if (!is_utf8(from, size)) return NO_TEXT;
    if (!bytes_room(to, size + 2)) return wrong(state, NO_MEMORY);
    to->at[to->used++] = '"';
    const uint8_t *end = from + size;
    while (from < end) {
        const uint8_t *plain = from;
        while (plain < end && *plain >= 0x20 && *plain != '"' && *plain != '\\') plain++;
        if (!put(to, from, (size_t)(plain - from))) return wrong(state, NO_MEMORY);
        from = plain;
        if (from == end) break;
        uint8_t sign = *from++;
        uint8_t text[6] = {'\\', sign, '0', '0', (uint8_t)HEX[sign >> 4], (uint8_t)HEX[sign & 15]};
        size_t length = 2;
        switch (sign) {
        case '"':
        case '\\': break;
        case '\b': text[1] = 'b'; break;
        case '\f': text[1] = 'f'; break;
        case '\n': text[1] = 'n'; break;
        case '\r': text[1] = 'r'; break;
        case '\t': text[1] = 't'; break;
        default: text[1] = 'u', length = 6;
        }
        if (!put(to, text, length)) return wrong(state, NO_MEMORY);
    }
    return put_byte(to, '"') ? DONE : wrong(state, NO_MEMORY);
}

static bool put_base64(Bytes *to, const uint8_t *from, size_t size) {
    static const char SIGNS[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    if (!bytes_room(to, (size + 2) / 3 * 4)) return false;
    uint8_t *at = to->at + to->used;
    for (size_t place = 0; place < size; place += 3) {
        size_t left = size - place;
        uint32_t three = (uint32_t)from[place] << 16;
        if (left > 1) three |= (uint32_t)from[place + 1] << 8;
        if (left > 2) three |= from[place + 2];
        *at++ = (uint8_t)SIGNS[three >> 18];
        *at++ = (uint8_t)SIGNS[three >> 12 & 63];
        *at++ = left > 1 ? (uint8_t)SIGNS[three >> 6 & 63] : '=';
        *at++ = left > 2 ? (uint8_t)SIGNS[three & 63] : '=';
    }
    to->used += (size + 2) / 3 * 4;
    return true;
}

/* The fewest of 15 to 17 digits that give the number back. */
static bool put_double(Bytes *to, double number) {
    if (isnan(number)) return PUT_TEXT(to, "{\"$numberDouble\":\"NaN\"}");
    if (isinf(number))
        return number > 0 ? PUT_TEXT(to, "{\"$numberDouble\":\"Infinity\"}")
                          : PUT_TEXT(to, "{\"$numberDouble\":\"-Infinity\"}");
    double amount = fabs(number);
    if (amount < 1e15 && (amount >= 1e-4 || amount == 0)) {
        /* with up to 15 digits a decimal number and its double name each other */
        static const double POWERS[] = {1, 10, 100, 1e3, 1e4, 1e5, 1e6};
        for (int places = 0; places <= 6; places++) {
            double scaled = amount * POWERS[places];
            if (scaled >= 1e15) break;
            uint64_t whole = (uint64_t)(scaled + 0.5);
            if ((double)whole / POWERS[places] != amount) continue;
            uint8_t text[24], *at = text + sizeof text;
            int digits = 0;
            if (places == 0) *--at = '0', *--at = '.';
            do {
                *--at = (uint8_t)('0' + whole % 10);
                whole /= 10;
                if (++digits == places) *--at = '.';
            } while (whole != 0 || digits <= places);
            if (signbit(number)) *--at = '-';
            return put(to, at, (size_t)(text + sizeof text - at));
        }
    }
    char text[40];
    int size = 0;
    for (int digits = 15; digits <= 17; digits++) {
        size = snprintf(text, sizeof text - 2, "%.*g", digits, number);
        if (digits == 17 || strtod(text, NULL) == number) break;
    }
    if (strpbrk(text, ".e") == NULL) text[size++] = '.', text[size++] = '0';
    return put(to, text, (size_t)size);
}

static void two_digits(uint8_t *to, int64_t number) {
    to[0] = (uint8_t)('0' + number / 10);
    to[1] = (uint8_t)('0' + number % 10);
}

/* A date from 1970 to 9999. */
static bool put_date(Bytes *to, int64_t ms) {
    int64_t days = ms / 86400000 + 719468, left = ms % 86400000;
    int64_t era = days / 146097, of_era = days % 146097;
    int64_t year = (of_era - of_era / 1460 + of_era / 36524 - of_era / 146096) / 365;
    int64_t of_year = of_era - (365 * year + year / 4 - year / 100), month = (5 * of_year + 2) / 153;
    int64_t day = of_year - (153 * month + 2) / 5 + 1;
    month += month < 10 ? 3 : -9;
    year += era * 400 + (month <= 2);
    uint8_t text[24] = "0000-00-00T00:00:00.000Z";
    two_digits(text, year / 100);
    two_digits(text + 2, year % 100);
    two_digits(text + 5, month);
    two_digits(text + 8, day);
    two_digits(text + 11, left / 3600000);
    two_digits(text + 14, left / 60000 % 60);
    two_digits(text + 17, left / 1000 % 60);
    if (left % 1000 == 0) {
        text[19] = 'Z';
        return put(to, text, 20);
    }
    text[20] = (uint8_t)('0' + left % 1000 / 100);
    two_digits(text + 21, left % 100);
    return put(to, text, 24);
}

typedef struct {
    bool negative;
    enum { NUMBER, NOT_A_NUMBER, INFINITE } special;
    uint128 coefficient;
    int exponent, count;
    uint8_t digits[40]; /* of the coefficient, as characters; "0" for zero */
} Decimal;

static void set_digits(Decimal *decimal, uint128 coefficient) {
    uint8_t turned[40];
    int count = 0;
    decimal->coefficient = coefficient;
    while (coefficient >> 64) turned[count++] = (uint8_t)('0' + (int)(coefficient % 10)), coefficient /= 10;
    uint64_t left = (uint64_t)coefficient;
    while (left) turned[count++] = (uint8_t)('0' + left % 10), left /= 10;
    if (count == 0) turned[count++] = '0';
    for (int place = 0; place < count; place++) decimal->digits[place] = turned[count - 1 - place];
    decimal->count = count;
}

static void read_decimal(const uint8_t *at, Decimal *decimal) {
    uint64_t low = (uint64_t)int64_at(at), high = (uint64_t)int64_at(at + 8);
    decimal->negative = high >> 63;
    decimal->special = NUMBER;
    decimal->exponent = 0;
    uint128 coefficient = 0;
    unsigned five = high >> 58 & 31;
    if (five == 31) {
        decimal->special = NOT_A_NUMBER;
        decimal->negative = false;
    } else if (five == 30) {
        decimal->special = INFINITE;
    } else if ((high >> 61 & 3) == 3) {
        /* a coefficient of more digits than there are: zero, says the standard */
        decimal->exponent = (int)(high >> 47 & 0x3FFF) - 6176;
    } else {
        decimal->exponent = (int)(high >> 49 & 0x3FFF) - 6176;
        coefficient = (uint128)(high & ((UINT64_C(1) << 49) - 1)) << 64 | low;
    }
    set_digits(decimal, coefficient);
    if (decimal->count > DECIMAL_DIGITS) set_digits(decimal, 0);
}

static void whole_decimal(int64_t number, Decimal *decimal) {
    decimal->negative = number < 0;
    decimal->special = NUMBER;
    decimal->exponent = 0;
    set_digits(decimal, number < 0 ? 0 - (uint64_t)number : (uint64_t)number);
}

static bool put_decimal(Bytes *to, const Decimal *decimal) {
    uint8_t text[80], *at = text;
    const uint8_t *digits = decimal->digits;
    int count = decimal->count, exponent = decimal->exponent, adjusted = exponent + count - 1;
    if (decimal->special == NOT_A_NUMBER) return PUT_TEXT(to, "NaN");
    if (decimal->negative) *at++ = '-';
    if (decimal->special == INFINITE) {
        memcpy(at, "Infinity", 8);
        at += 8;
    } else if (exponent > 0 || adjusted < -6) {
        *at++ = digits[0];
        if (count > 1) {
            *at++ = '.';
            memcpy(at, digits + 1, (size_t)count - 1);
            at += count - 1;
        }
        at += snprintf((char *)at, 16, "E%+d", adjusted);
    } else {
        int whole = count + exponent;
        if (whole > 0) {
            memcpy(at, digits, (size_t)whole);
            at += whole;
            if (exponent < 0) {
                *at++ = '.';
                memcpy(at, digits + whole, (size_t)(count - whole));
                at += count - whole;
            }
        } else {
            *at++ = '0', *at++ = '.';
            for (int place = 0; place < -whole; place++) *at++ = '0';
            memcpy(at, digits, (size_t)count);
            at += count;
        }
    }
    return put(to, text, (size_t)(at - text));
}

/* The number of units of *scale* that it is, in four words, least first; false: it is none, or has more digits. */
static bool to_units(const Decimal *decimal, int digits, int scale, uint64_t *words) {
    memset(words, 0, 32);
    if (decimal->special != NUMBER) return false;
    if (decimal->coefficient == 0) return !decimal->negative;
    int shift = decimal->exponent + scale;
    uint128 left = decimal->coefficient;
    if (decimal->count + shift > digits || decimal->count + shift < 1) return false;
    for (; shift < 0; shift++) {
        if (left % 10) return false;
        left /= 10;
    }
    words[0] = (uint64_t)left;
    words[1] = (uint64_t)(left >> 64);
    for (; shift > 0; shift--) {
        uint128 carry = 0;
        for (int word = 0; word < 4; word++) {
            carry += (uint128)words[word] * 10;
            words[word] = (uint64_t)carry;
            carry >>= 64;
        }
    }
    if (decimal->negative) {
        uint64_t carry = 1;
        for (int word = 0; word < 4; word++) {
            words[word] = ~words[word] + carry;
            carry = carry && words[word] == 0;
        }
    }
    return true;
}

#endif
