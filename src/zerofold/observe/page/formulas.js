"use strict";
// Evaluates what zerofold.plan.formulas wrote down while the plan's Python ran. Whole numbers are BigInts, as exact as
// Python's; floats are Numbers, the same doubles; where both meet, both languages make a double of the whole number.

function formulas({ nodes, regions }) {
  const floored = (a, b) => {
    const quotient = a / b;  // of BigInts: towards zero
    return a % b !== 0n && a < 0n !== b < 0n ? quotient - 1n : quotient;
  };
  // The double nearest to a / b, as Python gives it: 64 bits of the quotient, a last one for what is left, rounded once.
  const ratio = (a, b) => {
    const [up, down] = [a < 0n ? -a : a, b < 0n ? -b : b];
    const shift = BigInt(Math.max(0, 66 - up.toString(2).length + down.toString(2).length));
    const quotient = (up << shift) / down;
    const near = Number((quotient << 1n) | ((up << shift) % down === 0n ? 0n : 1n)) / 2 ** (Number(shift) + 1);
    return a < 0n !== b < 0n ? -near : near;
  };
  const halfToEven = (a) => {
    const low = Math.floor(a);
    const rest = a - low;
    return rest < 0.5 || (rest === 0.5 && low % 2 === 0) ? low : low + 1;
  };
  const whole = (turn) => (a) => (typeof a === "bigint" ? a : BigInt(turn(a)));
  const both = (operation) => (a, b) =>
    typeof a === typeof b ? operation(a, b) : operation(Number(a), Number(b));
  const COMPUTE = {
    "+": both((a, b) => a + b),
    "-": both((a, b) => a - b),
    "*": both((a, b) => a * b),
    "//": floored,
    "%": (a, b) => a - b * floored(a, b),
    "/": (a, b) => {
      if (Number(b) === 0) throw new RangeError("division by zero");
      return typeof a === "bigint" && typeof b === "bigint" ? ratio(a, b) : Number(a) / Number(b);
    },
    max: (a, b) => (b > a ? b : a),
    min: (a, b) => (b < a ? b : a),
    gcd: (a, b) => {
      while (b) [a, b] = [b, a % b];
      return a;
    },
    neg: (a) => -a,
    round: whole(halfToEven), floor: whole(Math.floor), ceil: whole(Math.ceil), trunc: whole(Math.trunc),
  };
  const COMPARE = { "<": (a, b) => a < b, "<=": (a, b) => a <= b, "==": (a, b) => a == b };

  // {row: {line: BigInt}} at a place; null where there is no such way to train, undefined where no formula reaches.
  return (place) => {
    const known = new Array(nodes.length);
    const value = (number) => {
      if (known[number] !== undefined) return known[number];
      const [operation, ...operands] = nodes[number];
      if (operation === "value") known[number] = typeof operands[0] === "string" ? BigInt(operands[0]) : operands[0];
      else if (operation === "input") known[number] = BigInt(place[operands[0]]);
      else known[number] = COMPUTE[operation](...operands.map(value));
      return known[number];
    };
    const holds = (guards) => {
      try {
        return guards.every(([compare, left, right, outcome]) => COMPARE[compare](value(left), value(right)) === outcome);
      } catch (error) {
        if (error instanceof RangeError) return false;  // another region's arithmetic divides by zero
        throw error;
      }
    };
    return Object.fromEntries(Object.entries(regions).map(([name, choices]) => {
      const region = choices.find(({ guards }) => holds(guards));
      if (region === undefined) return [name, undefined];
      if (region.refused) return [name, null];
      return [name, Object.fromEntries(Object.entries(region.outputs).map(([line, number]) => [line, value(number)]))];
    }));
  };
}
