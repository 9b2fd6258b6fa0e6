// Package manifests_test checks the manifests: each object, and the policy that bounds the rights of a node.
package manifests_test

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/cel-go/cel"
	admission "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbac "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/apiserver/pkg/cel/environment"
	"k8s.io/client-go/kubernetes/scheme"
)

// objects decodes all objects of a file. It fails the test if an object has an unknown field.
func objects(t *testing.T, file string) []runtime.Object {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	decoder := serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer()
	var all []runtime.Object
	for part := range bytes.SplitSeq(text, []byte("\n---\n")) {
		object, _, err := decoder.Decode(part, nil, nil)
		if err != nil {
			t.Fatalf("%s: %v\n%s", file, err, part)
		}
		all = append(all, object)
	}
	return all
}

// one returns the object of this type and name in the manifest.
func one[T interface {
	runtime.Object
	GetName() string
}](t *testing.T, name string) T {
	t.Helper()
	for _, object := range objects(t, "nvme-mpt.yaml") {
		if found, is := object.(T); is && found.GetName() == name {
			return found
		}
	}
	t.Fatalf("there is no %s of that type", name)
	panic("not reached")
}

func TestObjectsAreKnown(t *testing.T) {
	files, err := filepath.Glob("examples/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("%v, %v", files, err)
	}
	for _, file := range append(files, "nvme-mpt.yaml") {
		if len(objects(t, file)) == 0 {
			t.Errorf("%s is empty", file)
		}
	}
}

func TestRightsAreThoseThatAreUsed(t *testing.T) {
	type right struct{ group, resource, verb string }
	rights := func(role string) (all []right) {
		for _, rule := range one[*rbac.ClusterRole](t, role).Rules {
			for _, resource := range rule.Resources {
				for _, verb := range rule.Verbs {
					all = append(all, right{rule.APIGroups[0], resource, verb})
				}
			}
		}
		return all
	}
	const group = "resource.k8s.io"
	node := []right{{group, "resourceclaims", "get"}, {group, "resourceclaims", "list"}}
	for _, verb := range []string{"get", "list", "watch", "create", "update", "patch", "delete"} {
		node = append(node, right{group, "resourceslices", verb})
	}
	node = append(node, right{"", "nodes", "get"})
	if found := rights("nvme-mpt-node"); !slices.Equal(found, node) {
		t.Errorf("the node has %v", found)
	}
	hold := []right{
		{group, "resourceclaims", "get"}, {group, "resourceclaims", "list"}, {group, "resourceclaims", "watch"},
		{group, "resourceclaims/status", "update"}, {group, "resourceclaims/binding", "update"},
	}
	if found := rights("nvme-mpt-hold"); !slices.Equal(found, hold) {
		t.Errorf("hold has %v", found)
	}
}

func TestPodsAreConfined(t *testing.T) {
	node := one[*appsv1.DaemonSet](t, "nvme-mpt-node").Spec.Template.Spec
	hold := one[*appsv1.Deployment](t, "nvme-mpt-hold").Spec.Template.Spec
	var folders []string
	for _, volume := range node.Volumes {
		folders = append(folders, volume.HostPath.Path)
	}
	want := []string{"/var/lib/kubelet/plugins/nvme-mpt.internal", "/var/lib/kubelet/plugins_registry", "/var/run/cdi", "/var/lib/nvme-mpt"}
	if !slices.Equal(folders, want) || len(hold.Volumes) > 0 {
		t.Errorf("folders %v", folders)
	}
	for name, pod := range map[string]corev1.PodSpec{"node": node, "hold": hold} {
		if pod.HostNetwork || pod.HostPID || pod.HostIPC {
			t.Errorf("%s is in namespaces of the host", name)
		}
		for _, container := range pod.Containers {
			context := container.SecurityContext
			if context.Privileged != nil || *context.AllowPrivilegeEscalation || !*context.ReadOnlyRootFilesystem ||
				!slices.Equal(context.Capabilities.Drop, []corev1.Capability{"ALL"}) {
				t.Errorf("%s has %v", name, context)
			}
		}
	}
}

// TestANodeChangesSlicesOfItsOwnAlone evaluates the expressions of the manifest's admission policy.
func TestANodeChangesSlicesOfItsOwnAlone(t *testing.T) {
	policy := one[*admission.ValidatingAdmissionPolicy](t, "nvme-mpt-node")
	base := environment.MustBaseEnvSet(version.MajorMinor(1, 34))
	set, err := base.Extend(environment.VersionedOptions{
		IntroducedVersion: version.MajorMinor(1, 0),
		EnvOptions: []cel.EnvOption{
			cel.Variable("request", cel.DynType), cel.Variable("object", cel.DynType),
			cel.Variable("oldObject", cel.DynType), cel.Variable("variables", cel.DynType),
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	evaluate := func(expression string, input map[string]any) any {
		t.Helper()
		compiled, issues := set.NewExpressionsEnv().Compile(expression)
		if issues.Err() != nil {
			t.Fatalf("%s: %v", expression, issues.Err())
		}
		program, err := set.NewExpressionsEnv().Program(compiled)
		if err != nil {
			t.Fatal(err)
		}
		value, _, err := program.Eval(input)
		if err != nil {
			t.Fatalf("%s: %v", expression, err)
		}
		return value.Value()
	}
	slice := func(node, driver string) map[string]any {
		spec := map[string]any{"driver": driver}
		if node != "" {
			spec["nodeName"] = node
		}
		return map[string]any{"spec": spec}
	}
	const driver, account = "nvme-mpt.internal", "system:serviceaccount:nvme-mpt:nvme-mpt-node"
	onNode := map[string]any{"authentication.kubernetes.io/node-name": []any{"worker-1"}}
	for _, test := range []struct {
		name      string
		user      string
		extra     map[string]any
		operation string
		slice     map[string]any
		allowed   bool
	}{
		{"its own", account, onNode, "CREATE", slice("worker-1", driver), true},
		{"its own, deleted", account, onNode, "DELETE", slice("worker-1", driver), true},
		{"that of another node", account, onNode, "UPDATE", slice("worker-2", driver), false},
		{"that of another node, deleted", account, onNode, "DELETE", slice("worker-2", driver), false},
		{"one of all nodes", account, onNode, "CREATE", slice("", driver), false},
		{"one of another driver", account, onNode, "CREATE", slice("worker-1", "gpu.example.com"), false},
		{"by a token without a node", account, map[string]any{}, "CREATE", slice("", driver), false},
		{"by another account", "system:node:worker-2", map[string]any{}, "CREATE", slice("worker-2", "gpu.example.com"), true},
	} {
		t.Run(test.name, func(t *testing.T) {
			input := map[string]any{
				"request":   map[string]any{"operation": test.operation, "userInfo": map[string]any{"username": test.user, "extra": test.extra}},
				"object":    test.slice,
				"oldObject": nil,
			}
			if test.operation == "DELETE" {
				input["object"], input["oldObject"] = nil, test.slice
			}
			matches := true
			for _, condition := range policy.Spec.MatchConditions {
				matches = matches && evaluate(condition.Expression, input) == true
			}
			variables := make(map[string]any)
			for _, variable := range policy.Spec.Variables {
				variables[variable.Name] = evaluate(variable.Expression, input)
			}
			input["variables"] = variables
			allowed := true
			for _, validation := range policy.Spec.Validations {
				allowed = allowed && evaluate(validation.Expression, input) == true
			}
			if !matches {
				allowed = true
			}
			if allowed != test.allowed {
				t.Errorf("allowed: %v", allowed)
			}
		})
	}
}
